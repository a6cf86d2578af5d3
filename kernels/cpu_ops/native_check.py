"""A quick look, at start, that the library on this machine computes what it should: a few milliseconds of small inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import samples
from kernels.contract import Ops
from kernels.reference import ReferenceOps

TOLERANCE = 2e-5
"""Largest error, relative to the largest value, against the definition in fp64."""

_WIDTH, _TOKENS = 40, 19
_SHAPE = samples.MambaShape(heads=4, head_dim=6, groups=2, state=12)
_LIMIT = (0.0, float("inf"))


def check(ops: Ops) -> str | None:
    """None when all is well, else what is wrong. Leaves torch's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, run in _cases():
            state = torch.random.get_rng_state()
            mine = run(ops, torch.float32)
            torch.random.set_rng_state(state)
            expected = run(ReferenceOps(), torch.float64)
            error = _error(mine, expected)
            if not error <= TOLERANCE:
                return f"{name} is off by {error:.1e}"
    return None


def _error(mine: Tensor, expected: Tensor) -> float:
    return float((mine.double() - expected).abs().max() / expected.abs().max())


def _cases() -> Iterator[tuple[str, Callable[[Ops, torch.dtype], Tensor]]]:
    """Each draws its inputs in fp32, so that both runs see the same numbers."""
    yield "linear of one row", lambda ops, dtype: _linear(ops, 1, dtype)
    yield "linear of many rows", lambda ops, dtype: _linear(ops, _TOKENS, dtype)
    yield "rms_norm", _norm
    yield "mamba2_scan", _scan
    yield "paged_attention", _attention


def _linear(ops: Ops, rows: int, dtype: torch.dtype) -> Tensor:
    weight, x = torch.randn(37, _WIDTH), torch.randn(rows, _WIDTH)
    return ops.linear(x.to(dtype), ops.pack_linear(weight.to(dtype)), relu2=True)


def _norm(ops: Ops, dtype: torch.dtype) -> Tensor:
    y, gate, weight = torch.randn(3, _WIDTH), torch.randn(3, _WIDTH), torch.randn(_WIDTH)
    return ops.gated_group_rms_norm(y.to(dtype), gate.to(dtype), weight.to(dtype), 4, 1e-5)


def _scan(ops: Ops, dtype: torch.dtype) -> Tensor:
    rows = samples.prefill_rows([7, _TOKENS - 7], [True, False])
    i = samples.scan_inputs(_TOKENS, _SHAPE).to(dtype)
    _, states = samples.state_pool(samples.slots_needed(rows), _SHAPE)
    return ops.mamba2_scan(i.x, i.dt, i.b, i.c, i.a, i.d, i.dt_bias, _LIMIT, states.to(dtype), rows, 8)


def _attention(ops: Ops, dtype: torch.dtype) -> Tensor:
    rows = samples.attention_rows([(0, 9), (20, 30)], 16)
    query, cache = torch.randn(_TOKENS, 4, 12), samples.kv_cache(5, 2, 16, 12)
    return ops.paged_attention(query.to(dtype), cache.to(dtype), rows, 12**-0.5)
