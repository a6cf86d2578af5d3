"""The definitions against formulas that are written differently, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import samples
from kernels.elementwise import relu2, sigmoid, silu, softplus
from kernels.reference import ReferenceOps
from kernels.samples import MambaShape, ScanInputs

F64 = torch.float64
EXACT = 1e-12
SHAPE = MambaShape(heads=4, head_dim=3, groups=2, state=5)
NO_LIMIT = (0.0, float("inf"))
Check = Callable[..., None]


def closed_form(inputs: ScanInputs, limit: tuple[float, float], before: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = e^{L_t} S₀c_t + Σ_{s≤t} e^{L_t-L_s} dt_s (b_s·c_t) x_s + d x_t, without any recurrence. Returns y and the last state."""
    dt = F.softplus(inputs.dt + inputs.dt_bias).clamp(*limit)
    length, heads = dt.shape
    group = torch.arange(heads) // (heads // inputs.b.shape[1])
    b, c = inputs.b[:, group], inputs.c[:, group]
    log_decay = (dt * inputs.a).cumsum(0)
    between = log_decay[:, None] - log_decay[None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]
    decay = between.masked_fill(~causal, -torch.inf).exp()
    y = torch.einsum("tsh,sh,shn,thn,shp->thp", decay, dt, b, c, inputs.x)
    y += torch.einsum("th,hpn,thn->thp", log_decay.exp(), before, c) + inputs.d[:, None] * inputs.x
    after = torch.einsum("sh,sh,shp,shn->hpn", (log_decay[-1] - log_decay).exp(), dt, inputs.x, b)
    return y, after + log_decay[-1].exp()[:, None, None] * before


@pytest.mark.parametrize("limit", [NO_LIMIT, (0.05, 0.2)])
def test_scan_is_the_closed_form(reference: ReferenceOps, near: Check, limit: tuple[float, float]) -> None:
    lengths = [1, 2, 17, 40]
    rows = samples.prefill_rows(lengths, [True, False, True, False])
    inputs = samples.scan_inputs(sum(lengths), SHAPE, F64)
    _, states = samples.state_pool(5, SHAPE, F64)
    before = states.clone()
    out = reference.mamba2_scan(*inputs.arguments, limit, states, rows, 128)
    bounds = rows.cu_tokens.tolist()
    for r, has_state in enumerate(rows.has_state.tolist()):
        start, end = bounds[r], bounds[r + 1]
        y, after = closed_form(inputs.tokens(start, end), limit, before[r + 1] * has_state)
        near(out[start:end], y, EXACT)
        near(states[r + 1], after, EXACT)


def test_chunks_do_not_matter(reference: ReferenceOps) -> None:
    length, cuts = 23, [0, 1, 9, 10, 23]
    inputs = samples.scan_inputs(length, SHAPE, F64)
    x, weight, bias = torch.randn(length, SHAPE.channels, dtype=F64), torch.randn(SHAPE.channels, 4, dtype=F64), None
    windows, states = samples.state_pool(2, SHAPE, F64)
    whole = samples.prefill_rows([length], [False])
    y = reference.mamba2_scan(*inputs.arguments, NO_LIMIT, states, whole, 128)
    conv = reference.conv_prefill(x, weight, bias, windows, whole)
    state, window = states[1].clone(), windows[1].clone()
    for start, end in pairwise(cuts):
        part = samples.prefill_rows([end - start], [start > 0])
        assert torch.equal(reference.mamba2_scan(*inputs.tokens(start, end).arguments, NO_LIMIT, states, part, 128), y[start:end])
        assert torch.equal(reference.conv_prefill(x[start:end], weight, bias, windows, part), conv[start:end])
    assert torch.equal(states[1], state)
    assert torch.equal(windows[1], window)


def test_a_window_leaves_every_intermediate_state(reference: ReferenceOps) -> None:
    width = 5
    inputs = samples.scan_inputs(width, SHAPE, F64)
    rows = samples.window_rows(1, width)
    _, states = samples.state_pool(samples.slots_needed(rows), SHAPE, F64)
    committed = states[1].clone()
    y = reference.mamba2_update(*inputs.arguments, NO_LIMIT, states, rows)
    assert torch.equal(states[1], committed)
    for n in range(1, width + 1):
        alone = states[:2].clone()
        part = reference.mamba2_scan(*inputs.tokens(0, n).arguments, NO_LIMIT, alone, samples.prefill_rows([n]), 128)
        assert torch.equal(part, y[:n])
        assert torch.equal(alone[1], states[1 + n])


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv_is_conv1d(reference: ReferenceOps, near: Check, taps: int, with_bias: bool) -> None:
    shape = replace(SHAPE, taps=taps)
    x = torch.randn(9, shape.channels, dtype=F64)
    weight = torch.randn(shape.channels, taps, dtype=F64)
    bias = torch.randn(shape.channels, dtype=F64) if with_bias else None
    windows, _ = samples.state_pool(2, shape, F64)
    padded = torch.cat([windows[1], x])
    expected = F.silu(F.conv1d(padded.T[None], weight[:, None], bias, groups=shape.channels))[0].T
    near(reference.conv_prefill(x, weight, bias, windows, samples.prefill_rows([9])), expected, EXACT)
    assert torch.equal(windows[1], x[9 - (taps - 1) :])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("first_key", [0, 1])
def test_attention_is_sdpa(reference: ReferenceOps, near: Check, heads: tuple[int, int], first_key: int) -> None:
    query_heads, kv_heads = heads
    block_tokens, spans = 4, [(0, 6), (3, 4), (7, 13)]
    rows = samples.attention_rows(spans, block_tokens, first_key)
    cache = samples.kv_cache(16, kv_heads, block_tokens, 8, F64)
    query = torch.randn(int(rows.cu_tokens[-1]), query_heads, 8, dtype=F64)
    out = reference.paged_attention(query, cache, rows, 0.3)
    start = 0
    for r, (begin, end) in enumerate(spans):
        count = end - begin
        keys, values = cache[rows.block_table[r].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first_key:end]
        visible = torch.arange(first_key, end)[None] < torch.arange(begin, end)[:, None] + 1
        expected = F.scaled_dot_product_attention(
            query[start : start + count].transpose(0, 1)[None], keys[None], values[None], visible, scale=0.3, enable_gqa=True
        )[0].transpose(0, 1)
        expected = torch.where(visible.any(1)[:, None, None], expected, 0.0)
        near(out[start : start + count], expected, EXACT)
        start += count


def test_write_kv_is_read_back_by_attention(reference: ReferenceOps, near: Check) -> None:
    rows = samples.attention_rows([(5, 6)], 4)
    cache = samples.kv_cache(4, 2, 4, 8, F64)
    key, value = torch.full((1, 2, 8), 50.0, dtype=F64), torch.randn(1, 2, 8, dtype=F64)
    reference.write_kv(key, value, cache, samples.kv_index(rows, 4))
    query = torch.ones(1, 2, 8, dtype=F64)  # so close to the new key that it sees nothing else
    near(reference.paged_attention(query, cache, rows, 1.0), value, EXACT)


def test_norms(reference: ReferenceOps, near: Check) -> None:
    x, gate, weight = torch.randn(3, 12, dtype=F64), torch.randn(3, 20, dtype=F64)[:, 4:16], torch.randn(12, dtype=F64)
    near(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (12,), weight, 1e-5), EXACT)
    gated = (x * F.silu(gate)).view(3, 4, 3)
    expected = F.rms_norm(gated, (3,), None, 1e-5).reshape(3, 12) * weight
    near(reference.gated_group_rms_norm(x, gate, weight, 4, 1e-5), expected, EXACT)


def test_linear(reference: ReferenceOps, near: Check) -> None:
    x, weight = torch.randn(4, 7, dtype=F64), torch.randn(5, 7, dtype=F64)
    packed = reference.pack_linear(weight)
    assert (packed.out_features, packed.in_features) == (5, 7)
    near(reference.linear(x, packed), F.linear(x, weight), EXACT)
    near(reference.linear(x, packed, relu2=True), F.relu(F.linear(x, weight)) ** 2, EXACT)


@pytest.mark.parametrize("normalise", [True, False])
def test_route_chooses_with_bias_and_weighs_without(reference: ReferenceOps, near: Check, normalise: bool) -> None:
    x, gate, bias = torch.randn(6, 8, dtype=F64), torch.randn(5, 8, dtype=F64), torch.randn(5, dtype=F64)
    ids, weights = reference.route(x, gate, bias, 2, normalise, 2.5)
    scores = torch.sigmoid(x @ gate.T)
    assert torch.equal(ids, torch.topk(scores + bias, 2).indices)
    expected = scores.gather(1, ids)
    if normalise:
        expected = expected / expected.sum(1, keepdim=True)
    near(weights, expected * 2.5, EXACT)


def test_equal_choices_go_to_the_lower_id(reference: ReferenceOps) -> None:
    ids, _ = reference.route(torch.zeros(1, 4), torch.zeros(6, 4), torch.zeros(6), 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]]


def test_experts_are_a_weighted_sum(reference: ReferenceOps, near: Check) -> None:
    x, up, down = torch.randn(4, 6, dtype=F64), torch.randn(3, 5, 6, dtype=F64), torch.randn(3, 6, 5, dtype=F64)
    ids, weights = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]]), torch.randn(4, 2, dtype=F64)
    every = torch.einsum("edm,tem->ted", down, F.relu(torch.einsum("emd,td->tem", up, x)) ** 2)
    expected = (every.gather(1, ids[:, :, None].expand(-1, -1, 6)) * weights[:, :, None]).sum(1)
    near(reference.experts(x, reference.pack_experts(up, down), ids, weights), expected, EXACT)


def test_activations(near: Check) -> None:
    x = torch.tensor([-800.0, -90.0, -20.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 19.9, 20.1, 90.0, 800.0], dtype=F64)
    near(silu(x), F.silu(x), EXACT)
    near(sigmoid(x), torch.sigmoid(x), EXACT)
    near(softplus(x), F.softplus(x), EXACT)
    near(relu2(x), F.relu(x) ** 2, EXACT)


def test_activations_do_not_feel_their_place() -> None:
    x = torch.randn(70_003) * 5
    for activation in (silu, sigmoid, softplus):
        whole = activation(x)
        for start, length in [(0, 1), (1, 7), (3, 8), (5, 9), (2, 1000), (7, 40_001)]:
            assert torch.equal(activation(x[start : start + length].clone()), whole[start : start + length])
