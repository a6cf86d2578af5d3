"""The ops in C (``native/``): fp32, every reduction in one fixed order, so bits depend on a token's own past alone."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import AttentionRows, PackedWeight, PrefillRows, WindowRows
from kernels.cpu_ops.native_check import check
from kernels.cpu_ops.native_library import AttentionArguments, MambaArguments, NativeUnavailable, load_library, variant

__all__ = ["NativeOps", "NativeUnavailable", "load"]

PANEL = 16
"""Output columns of a weight panel, as in native/linear.c."""
HUGE_PAGE = (2 << 20) // 4
"""Floats of a huge page."""
MAX_TAPS = 8
TASK_QUERIES = 48
"""Queries of one attention task, as in native/attention.c: so many query heads at most may share a key/value head."""


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight [out, in] as panels [ceil(out/16), in, 16]."""

    panels: Tensor
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Panels of all experts: up [E, ceil(hidden/16), width, 16] and down [E, ceil(width/16), hidden, 16]."""

    up: Tensor
    down: Tensor
    width: int
    hidden: int


class NativeOps:
    """``kernels.contract.Ops`` by the C library.

    The library has its own threads, shared by all instances of the process; torch should be set to one thread, so that
    the two do not compete for cores.
    """

    chunk_invariant = True

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        assert threads >= 1
        self.name = f"native-{variant(library)}"
        self.threads = threads
        self._library = library
        self._linear = library.baton_linear
        self._rms_norm = library.baton_rms_norm

    def pack_linear(self, weight: Tensor) -> NativeWeight:
        out_features, in_features = weight.shape
        return NativeWeight(self._pack(weight[None])[0], out_features, in_features)

    def linear(self, x: Tensor, weight: PackedWeight, *, relu2: bool = False) -> Tensor:
        assert isinstance(weight, NativeWeight)
        rows, width = x.shape
        assert width == weight.in_features, f"input of width {width} for a weight of {weight.in_features}"
        out = torch.empty(rows, weight.out_features)
        panels = weight.panels.data_ptr()
        self._linear(_dense(x), rows, panels, weight.out_features, width, relu2, out.data_ptr(), self.threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width)
        self._rms_norm(_dense(x), _dense(weight), out.data_ptr(), rows, width, eps, self.threads)
        return out

    def gated_group_rms_norm(self, y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        rows, width = y.shape
        assert gate.shape == y.shape
        assert width % groups == 0
        out = torch.empty(rows, width)
        self._library.baton_gated_group_rms_norm(
            _dense(y), _strided(gate), _dense(weight), out.data_ptr(), rows, width, gate.stride(0), groups, eps, self.threads
        )
        return out

    def conv_prefill(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: PrefillRows) -> Tensor:
        tokens, out = x.shape[0], self._conv_output(x, weight, windows)
        # fmt: off
        self._library.baton_conv_prefill(
            _strided(x), _dense(weight), None if bias is None else _dense(bias), _strided(windows), out.data_ptr(),
            x.stride(0), windows.stride(0), *weight.shape, rows.num_rows, tokens,
            _index(rows.cu_tokens), _flags(rows.has_state), _index(rows.slot_in), _index(rows.slot_out), self.threads,
        )
        # fmt: on
        return out

    def conv_window(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: WindowRows) -> Tensor:
        assert x.shape[0] == rows.num_rows * rows.width
        out = self._conv_output(x, weight, windows)
        # fmt: off
        self._library.baton_conv_window(
            _strided(x), _dense(weight), None if bias is None else _dense(bias), _strided(windows), out.data_ptr(),
            x.stride(0), windows.stride(0), *weight.shape, rows.num_rows, rows.width,
            _index(rows.slot_in), _index(rows.slots_out), self.threads,
        )
        # fmt: on
        return out

    def mamba2_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: PrefillRows,
        chunk: int,
    ) -> Tensor:
        arguments, out = _mamba_arguments(x, dt, b, c, a, d, dt_bias, dt_limit, states)
        arguments.cu_tokens, arguments.has_state = _index(rows.cu_tokens), _flags(rows.has_state)
        arguments.slot_in, arguments.slots_out = _index(rows.slot_in), _index(rows.slot_out)
        arguments.rows = rows.num_rows
        self._library.baton_mamba2(ctypes.byref(arguments), self.threads)
        return out

    def mamba2_update(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: WindowRows,
    ) -> Tensor:
        assert x.shape[0] == rows.num_rows * rows.width
        arguments, out = _mamba_arguments(x, dt, b, c, a, d, dt_bias, dt_limit, states)
        arguments.slot_in, arguments.slots_out = _index(rows.slot_in), _index(rows.slots_out)
        arguments.rows, arguments.width = rows.num_rows, rows.width
        self._library.baton_mamba2(ctypes.byref(arguments), self.threads)
        return out

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, kv_index: Tensor) -> None:
        tokens = key.shape[0]
        _, _, heads, block_tokens, width = cache.shape
        assert kv_index.dtype is torch.int64
        assert kv_index.is_contiguous()
        # fmt: off
        self._library.baton_write_kv(
            _strided(key), _strided(value), _strided(cache), kv_index.data_ptr(), tokens, key.stride(0), value.stride(0), cache.stride(0),
            heads, block_tokens, width, self.threads,
        )
        # fmt: on

    def paged_attention(self, query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        query, num_keys = query.contiguous(), rows.num_keys.contiguous()  # both are often slices of something wider
        tokens, heads, width = query.shape
        _, _, kv_heads, block_tokens, _ = cache.shape
        assert heads % kv_heads == 0
        assert heads // kv_heads <= TASK_QUERIES
        out = torch.empty(tokens, heads, width)
        arguments = AttentionArguments(
            query=_dense(query),
            cache=_strided(cache),
            out=out.data_ptr(),
            cu_tokens=_index(rows.cu_tokens),
            block_table=_index(rows.block_table),
            num_keys=_index(num_keys),
            rows=rows.block_table.shape[0],
            tokens=tokens,
            cache_step=cache.stride(0),
            table_step=rows.block_table.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            block_tokens=block_tokens,
            width=width,
            first_key=rows.first_key,
            task_tokens=TASK_QUERIES * kv_heads // heads,
            scale=scale,
        )
        self._library.baton_paged_attention(ctypes.byref(arguments), self.threads)
        return out

    def route(self, x: Tensor, gate: Tensor, correction_bias: Tensor, top_k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
        tokens, width = x.shape
        experts = gate.shape[0]
        assert top_k <= experts
        ids, weights = torch.empty(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k)
        # fmt: off
        self._library.baton_route(
            _dense(x), _dense(gate), _dense(correction_bias), ids.data_ptr(), weights.data_ptr(), tokens, width, experts, top_k,
            normalise, scaling, self.threads,
        )
        # fmt: on
        return ids, weights

    def pack_experts(self, up: Tensor, down: Tensor) -> NativeExperts:
        _, hidden, width = up.shape
        assert down.shape == (up.shape[0], width, hidden)
        return NativeExperts(self._pack(up), self._pack(down), width, hidden)

    def experts(self, x: Tensor, packed: NativeExperts, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, width = x.shape
        assert width == packed.width
        assert ids.dtype is torch.int64
        assert ids.is_contiguous()
        out = torch.empty(tokens, width)
        # fmt: off
        self._library.baton_experts(
            _dense(x), ids.data_ptr(), _dense(weights), packed.up.data_ptr(), packed.down.data_ptr(), out.data_ptr(),
            tokens, ids.shape[1], packed.up.shape[0], width, packed.hidden, self.threads,
        )
        # fmt: on
        return out

    def _pack(self, weights: Tensor) -> Tensor:
        """[count, n, k] -> panels [count, ceil(n/16), k, 16]."""
        count, n, k = weights.shape
        weights = weights.detach().contiguous()
        panels = _page_aligned(count, math.ceil(n / PANEL), k, PANEL)
        self._library.baton_pack(_dense(weights), panels.data_ptr(), count, n, k, self.threads)
        return panels

    def _conv_output(self, x: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
        channels, taps = weight.shape
        assert 2 <= taps <= MAX_TAPS
        assert windows.shape[1:] == (taps - 1, channels)
        return torch.empty(x.shape[0], channels)


def load(threads: int | None = None) -> NativeOps:
    """The native ops on ``threads`` threads (default: the cores that this process may use).

    Raises NativeUnavailable when the library is not built, is of another version, needs a feature that this CPU lacks, or
    does not give the results that it should.
    """
    ops = NativeOps(load_library(), threads or _usable_cores())
    if complaint := check(ops):
        raise NativeUnavailable(f"native kernels fail their self-check: {complaint}")
    return ops


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _page_aligned(*shape: int) -> Tensor:
    """Uninitialised; what is as large as a huge page begins on one, so that baton_pack can ask for them."""
    count = math.prod(shape)
    if count < HUGE_PAGE:
        return torch.empty(shape)
    memory = torch.empty(count + HUGE_PAGE)
    skip = -(memory.data_ptr() // memory.element_size()) % HUGE_PAGE
    return memory[skip : skip + count].view(shape)


def _dense(tensor: Tensor) -> int:
    """Address of a contiguous fp32 tensor."""
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _strided(tensor: Tensor) -> int:
    """Address of an fp32 tensor whose first dimension may have any stride and whose others are contiguous."""
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous() or _is_dense_inside(tensor.shape, tensor.stride())
    return tensor.data_ptr()


def _is_dense_inside(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for i in range(len(shape) - 1, 0, -1):
        if strides[i] != step and shape[i] != 1:
            return False
        step *= shape[i]
    return True


def _index(tensor: Tensor) -> int:
    assert tensor.dtype is torch.int32
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _flags(tensor: Tensor) -> int:
    assert tensor.dtype is torch.bool
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _mamba_arguments(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    states: Tensor,
) -> tuple[MambaArguments, Tensor]:
    """All but the rows, and the output [T, H, P]."""
    tokens, heads, head_width = x.shape
    _, groups, state_width = b.shape
    assert heads % groups == 0
    assert states.shape[1:] == (heads, head_width, state_width)
    out = torch.empty(tokens, heads, head_width)
    arguments = MambaArguments(
        x=_strided(x),
        dt=_strided(dt),
        b=_strided(b),
        c=_strided(c),
        a=_dense(a),
        d=_dense(d),
        dt_bias=_dense(dt_bias),
        states=_strided(states),
        out=out.data_ptr(),
        x_step=x.stride(0),
        dt_step=dt.stride(0),
        b_step=b.stride(0),
        c_step=c.stride(0),
        state_step=states.stride(0),
        heads=heads,
        head_width=head_width,
        groups=groups,
        state_width=state_width,
        tokens=tokens,
        dt_low=dt_limit[0],
        dt_high=dt_limit[1],
    )
    return arguments, out
