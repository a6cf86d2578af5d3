"""Each fast op against the fp64 reference, over shapes around every tile and chunk border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import samples
from kernels.contract import Ops
from kernels.reference import ReferenceOps
from kernels.samples import MambaShape

Check = Callable[..., None]
NO_LIMIT = (0.0, float("inf"))
SHAPES = [
    MambaShape(heads=4, head_dim=8, groups=2, state=16),
    MambaShape(heads=3, head_dim=5, groups=1, state=7, taps=2),
    MambaShape(heads=8, head_dim=16, groups=8, state=32, taps=3),
]
RAGGED = [[1], [2], [8], [9], [63], [64], [65], [1, 8, 9], [129, 1, 15, 16, 17, 2]]


@pytest.mark.parametrize("in_out", [(1, 1), (7, 5), (13, 17), (64, 33), (100, 1), (1, 8), (129, 257), (768, 200)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("relu2", [False, True])
def test_linear(ops: Ops, reference: ReferenceOps, near: Check, in_out: tuple[int, int], num_rows: int, relu2: bool) -> None:
    width, out = in_out
    x, weight = torch.randn(num_rows, width), torch.randn(out, width)
    packed = ops.pack_linear(weight)
    assert (packed.out_features, packed.in_features) == (out, width)
    expected = reference.linear(x.double(), reference.pack_linear(weight.double()), relu2=relu2)
    near(ops.linear(x, packed, relu2=relu2), expected)


def test_linear_keeps_nothing_of_the_weight(ops: Ops) -> None:
    weight, x = torch.randn(24, 32), torch.randn(3, 32)
    packed = ops.pack_linear(weight)
    before = ops.linear(x, packed)
    weight.fill_(torch.nan)
    assert torch.equal(ops.linear(x, packed), before)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize(("width", "groups"), [(8, 1), (12, 4), (35, 5), (1536, 4)])
def test_norms(ops: Ops, reference: ReferenceOps, near: Check, num_rows: int, width: int, groups: int) -> None:
    x, gate, weight = torch.randn(num_rows, width), torch.randn(num_rows, width + 7)[:, 3 : 3 + width] * 4, torch.randn(width)
    near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    expected = reference.gated_group_rms_norm(x.double(), gate.double(), weight.double(), groups, 1e-5)
    near(ops.gated_group_rms_norm(x, gate, weight, groups, 1e-5), expected)


def test_norms_leave_their_inputs_alone(ops: Ops) -> None:
    x, gate, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    copies = x.clone(), gate.clone(), weight.clone()
    ops.rms_norm(x, weight, 1e-5)
    ops.gated_group_rms_norm(x, gate, weight, 2, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip((x, gate, weight), copies, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv_prefill(ops: Ops, reference: ReferenceOps, near: Check, shape: MambaShape, lengths: list[int], with_bias: bool) -> None:
    rows = samples.prefill_rows(lengths, [r % 2 == 0 for r in range(len(lengths))])
    x = torch.randn(sum(lengths), shape.channels + 5)[:, 2:-3]
    weight, bias = torch.randn(shape.channels, shape.taps), torch.randn(shape.channels) if with_bias else None
    windows, _ = samples.state_pool(samples.slots_needed(rows), shape)
    exact = windows.double()
    expected = reference.conv_prefill(x.double(), weight.double(), None if bias is None else bias.double(), exact, rows)
    near(ops.conv_prefill(x, weight, bias, windows, rows), expected)
    assert torch.equal(windows, exact.float())  # raw inputs: nothing is computed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_conv_window(ops: Ops, reference: ReferenceOps, near: Check, shape: MambaShape, num_rows: int, width: int) -> None:
    rows = samples.window_rows(num_rows, width)
    x = torch.randn(num_rows * width, shape.channels)
    weight, bias = torch.randn(shape.channels, shape.taps), torch.randn(shape.channels)
    windows, _ = samples.state_pool(samples.slots_needed(rows), shape)
    exact = windows.double()
    expected = reference.conv_window(x.double(), weight.double(), bias.double(), exact, rows)
    near(ops.conv_window(x, weight, bias, windows, rows), expected)
    assert torch.equal(windows, exact.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("chunk", [16, 128])
def test_scan(ops: Ops, reference: ReferenceOps, near: Check, shape: MambaShape, lengths: list[int], chunk: int) -> None:
    rows = samples.prefill_rows(lengths, [r % 2 == 0 for r in range(len(lengths))])
    inputs = samples.scan_inputs(sum(lengths), shape)
    _, states = samples.state_pool(samples.slots_needed(rows), shape)
    exact = states.double()
    expected = reference.mamba2_scan(*inputs.to(torch.float64).arguments, NO_LIMIT, exact, rows, chunk)
    near(ops.mamba2_scan(*inputs.arguments, NO_LIMIT, states, rows, chunk), expected)
    near(states, exact)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.3)])
def test_scan_survives_strong_decay(ops: Ops, reference: ReferenceOps, near: Check, limit: tuple[float, float]) -> None:
    shape = SHAPES[0]
    rows = samples.prefill_rows([200])
    inputs = samples.scan_inputs(200, shape)
    inputs = replace(inputs, a=inputs.a * 16, dt=inputs.dt * 8 + 8)  # e^{L} far below the smallest float
    _, states = samples.state_pool(2, shape)
    exact = states.double()
    expected = reference.mamba2_scan(*inputs.to(torch.float64).arguments, limit, exact, rows, 64)
    near(ops.mamba2_scan(*inputs.arguments, limit, states, rows, 64), expected)
    near(states, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_update(ops: Ops, reference: ReferenceOps, near: Check, shape: MambaShape, num_rows: int, width: int) -> None:
    rows = samples.window_rows(num_rows, width)
    inputs = samples.scan_inputs(num_rows * width, shape)
    _, states = samples.state_pool(samples.slots_needed(rows), shape)
    committed, exact = states[1 : 1 + num_rows].clone(), states.double()
    expected = reference.mamba2_update(*inputs.to(torch.float64).arguments, NO_LIMIT, exact, rows)
    near(ops.mamba2_update(*inputs.arguments, NO_LIMIT, states, rows), expected)
    near(states, exact)
    assert torch.equal(states[1 : 1 + num_rows], committed)


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 8), (12, 4, 64), (2, 2, 5)])
@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 2)],
        [(0, 16)],
        [(15, 16)],
        [(16, 17)],
        [(0, 65), (100, 128), (120, 129)],
        [(127, 133), (254, 257), (300, 301), (0, 3)],
    ],
    ids=str,
)
def test_attention(
    ops: Ops, reference: ReferenceOps, near: Check, heads: tuple[int, int, int], first_key: int, spans: list[tuple[int, int]]
) -> None:
    query_heads, kv_heads, width = heads
    rows = samples.attention_rows(spans, 16, first_key)
    cache = samples.kv_cache(60, kv_heads, 16, width)
    query = torch.randn(int(rows.cu_tokens[-1]), query_heads, width)
    expected = reference.paged_attention(query.double(), cache.double(), rows, width**-0.5)
    near(ops.paged_attention(query, cache, rows, width**-0.5), expected)


def test_attention_to_nothing_is_zero(any_ops: Ops) -> None:
    rows = samples.attention_rows([(0, 3)], 16, first_key=1)
    cache = samples.kv_cache(2, 2, 16, 8)
    out = any_ops.paged_attention(torch.randn(3, 4, 8), cache, rows, 1.0)
    assert torch.equal(out[0], torch.zeros(4, 8))
    assert bool(out[1:].abs().sum(dim=(1, 2)).gt(0).all())


def test_attention_survives_large_scores(ops: Ops, reference: ReferenceOps, near: Check) -> None:
    rows = samples.attention_rows([(140, 150)], 16)
    cache, query = samples.kv_cache(11, 2, 16, 8) * 30, torch.randn(10, 4, 8) * 30
    near(ops.paged_attention(query, cache, rows, 1.0), reference.paged_attention(query.double(), cache.double(), rows, 1.0), 1e-4)


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_write_kv(ops: Ops, reference: ReferenceOps, block_tokens: int) -> None:
    rows = samples.attention_rows([(0, 3), (6, 9), (15, 18)], block_tokens)
    index = samples.kv_index(rows, block_tokens)
    cache = samples.kv_cache(64, 2, block_tokens, 8)
    expected = cache.clone()
    joint = torch.randn(9, 2, 2, 8)  # key and value as strided slices of one projection
    ops.write_kv(joint[:, 0], joint[:, 1], cache, index)
    reference.write_kv(joint[:, 0], joint[:, 1], expected, index)
    assert torch.equal(cache, expected)


def test_write_kv_to_the_sink_touches_the_sink_only(ops: Ops) -> None:
    cache = samples.kv_cache(3, 2, 4, 8)
    before = cache.clone()
    ops.write_kv(torch.randn(4, 2, 8), torch.randn(4, 2, 8), cache, torch.tensor([0, 0, 1, 0]))
    assert torch.equal(cache[1:], before[1:])
    assert not torch.equal(cache[0, :, :, 0], before[0, :, :, 0])


@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
@pytest.mark.parametrize("normalise", [True, False])
def test_route(ops: Ops, reference: ReferenceOps, near: Check, num_rows: int, normalise: bool) -> None:
    x, gate, bias = torch.randn(num_rows, 24), torch.randn(10, 24), torch.randn(10)
    ids, weights = ops.route(x, gate, bias, 3, normalise, 2.5)
    expected_ids, expected = reference.route(x.double(), gate.double(), bias.double(), 3, normalise, 2.5)
    assert torch.equal(ids, expected_ids)
    near(weights, expected)


def test_route_gives_equal_choices_to_the_lower_id(ops: Ops) -> None:
    ids, _ = ops.route(torch.zeros(2, 4), torch.zeros(20, 4), torch.zeros(20), 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
@pytest.mark.parametrize(("width", "middle"), [(8, 16), (33, 7)])
def test_experts(ops: Ops, reference: ReferenceOps, near: Check, num_rows: int, width: int, middle: int) -> None:
    x, up, down = torch.randn(num_rows, width), torch.randn(6, middle, width), torch.randn(6, width, middle)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(num_rows)]) if num_rows else torch.zeros(0, 3, dtype=torch.int64)
    weights = torch.rand(num_rows, 3)
    expected = reference.experts(x.double(), reference.pack_experts(up.double(), down.double()), ids, weights.double())
    near(ops.experts(x, ops.pack_experts(up, down), ids, weights), expected)
