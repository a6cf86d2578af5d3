"""Bit for bit: a token does not feel the other rows, the window's width, its place in it, nor what lies in unused memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import samples
from kernels.contract import SINK, AttentionRows, Ops, PrefillRows, WindowRows
from kernels.samples import MambaShape

NO_LIMIT = (0.0, float("inf"))
SHAPES = [
    MambaShape(heads=4, head_dim=8, groups=2, state=16),
    MambaShape(heads=3, head_dim=5, groups=1, state=7),
    MambaShape(heads=24, head_dim=64, groups=4, state=64),
]
EVERY_COUNT = list(range(1, 513))
SMALL_LINEAR = [(64, 33), (7, 5), (100, 1), (1, 8), (13, 17), (256, 192)]
LARGE_LINEAR = [(768, 3352), (2048, 768), (4096, 65), (768, 32000)]


def assert_rows_alone(ops: Ops, width: int, out: int, counts: list[int], relu2: bool = False) -> None:
    """Every row beside any number of others, at its own place, equals the row computed alone."""
    x, packed = torch.randn(max(counts), width), ops.pack_linear(torch.randn(out, width))
    alone = torch.cat([ops.linear(x[t : t + 1], packed, relu2=relu2) for t in range(min(len(x), 40))])
    for count in counts:
        together = ops.linear(x[:count], packed, relu2=relu2)
        assert torch.equal(together[: len(alone)], alone[:count]), f"{count} rows of {width} x {out}"
    shifted = ops.linear(x[-len(alone) :].flip(0), packed, relu2=relu2).flip(0)
    assert torch.equal(shifted, ops.linear(x, packed, relu2=relu2)[-len(alone) :])


@pytest.mark.parametrize(("width", "out"), SMALL_LINEAR)
def test_linear_rows(any_ops: Ops, width: int, out: int) -> None:
    counts = EVERY_COUNT if (width, out) == SMALL_LINEAR[0] else [*range(1, 34), 47, 48, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512]
    counts = counts if any_ops.name != "reference" else [1, 2, 3, 17]
    assert_rows_alone(any_ops, width, out, counts)


@pytest.mark.parametrize(("width", "out"), LARGE_LINEAR)
def test_large_linear_rows(ops: Ops, width: int, out: int) -> None:
    counts = [1, 2, 3, 5, 6, 8, 12, 16, 17, 48] if out > 10_000 else [*range(1, 20), 31, 32, 33, 64, 65, 127, 128, 300, 512]
    assert_rows_alone(ops, width, out, counts)


@pytest.mark.parametrize(("width", "out"), [(768, 3352), (64, 33)])
def test_linear_threads(ops: Ops, width: int, out: int) -> None:
    """Two torch threads (native has its own): each row as with one, in any number of rows."""
    x, packed = torch.randn(65, width), ops.pack_linear(torch.randn(out, width))
    expected = ops.linear(x, packed)
    torch.set_num_threads(2)
    for count in (1, 2, 3, 6, 17, 33, 65):
        assert torch.equal(ops.linear(x[:count], packed), expected[:count])


def test_linear_relu2_rows(ops: Ops) -> None:
    assert_rows_alone(ops, 96, 130, [1, 2, 3, 4, 6, 9, 31, 64, 200], relu2=True)


@pytest.mark.parametrize("width", [5, 24, 768, 1537])
def test_norm_rows(any_ops: Ops, width: int) -> None:
    x, gate, weight = torch.randn(67, width), torch.randn(67, width + 3)[:, 1:-2], torch.randn(width)
    plain = any_ops.rms_norm(x, weight, 1e-5)
    gated = any_ops.gated_group_rms_norm(x, gate, weight, 1, 1e-5)
    for start, end in [(0, 1), (3, 4), (66, 67), (1, 3), (10, 57)]:
        assert torch.equal(any_ops.rms_norm(x[start:end], weight, 1e-5), plain[start:end])
        assert torch.equal(any_ops.gated_group_rms_norm(x[start:end], gate[start:end], weight, 1, 1e-5), gated[start:end])


@pytest.mark.parametrize("groups", [2, 8])
def test_group_norm_rows(any_ops: Ops, groups: int) -> None:
    y, gate, weight = torch.randn(33, 1536), torch.randn(33, 1600)[:, 64:], torch.randn(1536)
    whole = any_ops.gated_group_rms_norm(y, gate, weight, groups, 1e-5)
    for start, end in [(0, 1), (32, 33), (2, 13)]:
        assert torch.equal(any_ops.gated_group_rms_norm(y[start:end], gate[start:end], weight, groups, 1e-5), whole[start:end])


def test_moe_rows(any_ops: Ops) -> None:
    x, gate, bias = torch.randn(37, 40), torch.randn(9, 40), torch.randn(9)
    packed = any_ops.pack_experts(torch.randn(9, 24, 40), torch.randn(9, 40, 24))
    ids, weights = any_ops.route(x, gate, bias, 3, True, 1.5)
    out = any_ops.experts(x, packed, ids, weights)
    for start, end in [(0, 1), (36, 37), (5, 7), (3, 30)]:
        part_ids, part_weights = any_ops.route(x[start:end], gate, bias, 3, True, 1.5)
        assert torch.equal(part_ids, ids[start:end])
        assert torch.equal(part_weights, weights[start:end])
        assert torch.equal(any_ops.experts(x[start:end], packed, part_ids, part_weights), out[start:end])


class Recurrent:
    """Conv and recurrence over one pool, as a layer runs them, for any rows."""

    def __init__(self, ops: Ops, shape: MambaShape, num_tokens: int, num_slots: int) -> None:
        self.ops, self.shape = ops, shape
        self.raw = torch.randn(num_tokens, shape.channels)
        self.inputs = samples.scan_inputs(num_tokens, shape)
        self.weight, self.bias = torch.randn(shape.channels, shape.taps), torch.randn(shape.channels)
        self.windows, self.states = samples.state_pool(num_slots, shape)

    def prefill(self, tokens: Tensor, rows: PrefillRows) -> tuple[Tensor, Tensor]:
        conv = self.ops.conv_prefill(self.raw[tokens], self.weight, self.bias, self.windows, rows)
        return conv, self.ops.mamba2_scan(*self._tokens(tokens), NO_LIMIT, self.states, rows, 64)

    def window(self, tokens: Tensor, rows: WindowRows) -> tuple[Tensor, Tensor]:
        conv = self.ops.conv_window(self.raw[tokens], self.weight, self.bias, self.windows, rows)
        return conv, self.ops.mamba2_update(*self._tokens(tokens), NO_LIMIT, self.states, rows)

    def slot(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows[index].clone(), self.states[index].clone()

    def _tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        i = self.inputs
        return i.x[tokens], i.dt[tokens], i.b[tokens], i.c[tokens], i.a, i.d, i.dt_bias


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def one_row(width: int, slot_in: int, first_out: int) -> WindowRows:
    slots_out = torch.arange(first_out, first_out + width, dtype=torch.int32)[None]
    return WindowRows(width=width, slot_in=torch.tensor([slot_in], dtype=torch.int32), slots_out=slots_out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_of_every_width(any_ops: Ops, shape: MambaShape) -> None:
    """Position j of a window: the same in windows of 1..8, and as the j-th of single steps."""
    layer = Recurrent(any_ops, shape, 8, 40)
    tokens = torch.arange(8)
    widest = layer.window(tokens, one_row(8, 1, 2))
    states = [layer.slot(2 + j) for j in range(8)]
    for width in range(1, 8):
        part = layer.window(tokens[:width], one_row(width, 1, 20))
        assert equal(part, (widest[0][:width], widest[1][:width]))
        assert all(equal(layer.slot(20 + j), states[j]) for j in range(width))
    for j in range(8):
        part = layer.window(tokens[j : j + 1], one_row(1, 1 if j == 0 else 29 + j, 30 + j))
        assert equal(part, (widest[0][j : j + 1], widest[1][j : j + 1]))
        assert equal(layer.slot(30 + j), states[j])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_commit_equals_extend(any_ops: Ops, shape: MambaShape) -> None:
    """The state after n window positions is that of an EXTEND over the same n tokens."""
    layer = Recurrent(any_ops, shape, 8, 20)
    before = layer.slot(1)
    layer.window(torch.arange(8), one_row(8, 1, 2))
    assert equal(layer.slot(1), before)
    slots = torch.tensor([1], dtype=torch.int32)
    for n in range(1, 9):
        out = torch.tensor([15], dtype=torch.int32)
        rows = PrefillRows(cu_tokens=torch.tensor([0, n], dtype=torch.int32), has_state=torch.tensor([True]), slot_in=slots, slot_out=out)
        layer.prefill(torch.arange(n), rows)
        assert equal(layer.slot(15), layer.slot(1 + n))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_rows_do_not_meet(any_ops: Ops, shape: MambaShape) -> None:
    num_rows, width = 5, 3
    layer = Recurrent(any_ops, shape, num_rows * width, 40)
    rows = samples.window_rows(num_rows, width)
    conv, y = layer.window(torch.arange(num_rows * width), rows)
    states = {int(slot): layer.slot(int(slot)) for slot in rows.slots_out.flatten()}
    for r in range(num_rows):
        tokens = torch.arange(r * width, (r + 1) * width)
        alone = WindowRows(width=width, slot_in=rows.slot_in[r : r + 1], slots_out=rows.slots_out[r : r + 1] + 15)
        assert equal(layer.window(tokens, alone), (conv[tokens], y[tokens]))
        assert all(equal(layer.slot(int(slot) + 15), states[int(slot)]) for slot in rows.slots_out[r])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_rows_do_not_meet(any_ops: Ops, shape: MambaShape) -> None:
    lengths = [1, 9, 70, 8, 33] if any_ops.name != "reference" else [1, 9, 3]
    rows = samples.prefill_rows(lengths, [r % 2 == 1 for r in range(len(lengths))])
    layer = Recurrent(any_ops, shape, sum(lengths), 20)
    pools = layer.windows.clone(), layer.states.clone()
    conv, y = layer.prefill(torch.arange(sum(lengths)), rows)
    after = [layer.slot(1 + r) for r in range(len(lengths))]
    layer.windows.copy_(pools[0])
    layer.states.copy_(pools[1])
    bounds = rows.cu_tokens.tolist()
    for r, length in enumerate(lengths):
        tokens = torch.arange(bounds[r], bounds[r + 1])
        alone = PrefillRows(
            cu_tokens=torch.tensor([0, length], dtype=torch.int32),
            has_state=rows.has_state[r : r + 1],
            slot_in=rows.slot_in[r : r + 1],
            slot_out=rows.slot_out[r : r + 1] + 10,  # not in place: the same result
        )
        assert equal(layer.prefill(tokens, alone), (conv[tokens], y[tokens]))
        assert equal(layer.slot(11 + r), after[r])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_do_not_matter_where_it_is_promised(any_ops: Ops, shape: MambaShape) -> None:
    if not any_ops.chunk_invariant:
        pytest.skip(f"{any_ops.name} makes no such promise")
    length, cuts = 70, [0, 1, 8, 40, 57, 70]
    layer = Recurrent(any_ops, shape, length, 4)
    conv, y = layer.prefill(torch.arange(length), samples.prefill_rows([length], [False]))
    after = layer.slot(1)
    for start, end in pairwise(cuts):
        tokens = torch.arange(start, end)
        assert equal(layer.prefill(tokens, samples.prefill_rows([end - start], [start > 0])), (conv[tokens], y[tokens]))
    assert equal(layer.slot(1), after)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_without_state_ignores_its_slot(any_ops: Ops, poison: float) -> None:
    shape = SHAPES[0]
    lengths = [1, 3, 20, 70]
    rows = samples.prefill_rows(lengths, [False] * 4)
    layer = Recurrent(any_ops, shape, sum(lengths), 6)
    layer.windows.zero_()
    layer.states.zero_()
    clean, slots = layer.prefill(torch.arange(sum(lengths)), rows), [layer.slot(1 + r) for r in range(4)]
    layer.windows.fill_(poison)
    layer.states.fill_(poison)
    assert equal(layer.prefill(torch.arange(sum(lengths)), rows), clean)
    assert all(equal(layer.slot(1 + r), slots[r]) for r in range(4))
    assert bool(layer.states[[0, 5]].eq(poison).all() if poison == torch.inf else layer.states[[0, 5]].isnan().all())


def test_windows_ignore_what_their_scratch_holds_and_sink_rows_harm_nobody(any_ops: Ops) -> None:
    shape, width = SHAPES[0], 3
    layer = Recurrent(any_ops, shape, 2 * width, 8)
    clean = layer.window(torch.arange(width), one_row(width, 1, 2))
    slots = [layer.slot(s) for s in range(1, 5)]
    for slot in (0, 2, 3, 4, 5, 6, 7):
        layer.windows[slot] = torch.nan
        layer.states[slot] = torch.nan
    sinks = torch.full((1, width), SINK, dtype=torch.int32)
    row = one_row(width, 1, 2)
    rows = WindowRows(width=width, slot_in=torch.tensor([1, SINK], dtype=torch.int32), slots_out=torch.cat([row.slots_out, sinks]))
    conv, y = layer.window(torch.arange(2 * width), rows)
    assert equal((conv[:width], y[:width]), clean)
    assert all(equal(layer.slot(1 + s), slots[s]) for s in range(4))
    assert bool(layer.states[5:].isnan().all())


HEADS = [(4, 2, 16), (3, 1, 8), (1, 1, 8), (12, 4, 64), (2, 2, 5)]


def single(rows: AttentionRows, row: int, token: int) -> AttentionRows:
    return AttentionRows(
        cu_tokens=torch.tensor([0, 1], dtype=torch.int32),
        block_table=rows.block_table[row : row + 1],
        num_keys=rows.num_keys[token : token + 1],
        first_key=rows.first_key,
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("first_key", [0, 1])
def test_attention_in_windows_of_every_width(any_ops: Ops, heads: tuple[int, int, int], first_key: int) -> None:
    """A query alone equals the same query at any place of a window of any width, beside any other rows."""
    query_heads, kv_heads, width = heads
    bases = [0, 124, 251] if any_ops.name != "reference" or width <= 16 else [0, 0, 12]
    cache = samples.kv_cache(40, kv_heads, 16, width)
    query = torch.randn(3, 12, query_heads, width)
    full = samples.attention_rows([(base, base + 12) for base in bases], 16, first_key)
    alone = torch.stack(
        [any_ops.paged_attention(query[r, j : j + 1], cache, single(full, r, 12 * r + j), 0.4)[0] for r in range(3) for j in range(12)]
    ).view(3, 12, query_heads, width)
    for place in (0, 3):
        for size in (1, 2, 4, 8) if any_ops.name == "reference" else range(1, 9):
            tokens = torch.arange(12).repeat(3, 1)[:, place : place + size]
            rows = AttentionRows(
                cu_tokens=torch.arange(4, dtype=torch.int32) * size,
                block_table=full.block_table,
                num_keys=full.num_keys.view(3, 12)[:, place : place + size].flatten(),
                first_key=first_key,
            )
            out = any_ops.paged_attention(query[:, tokens[0]].flatten(0, 1), cache, rows, 0.4)
            assert torch.equal(out.view(3, size, query_heads, width), alone[:, tokens[0]]), f"width {size} at {place}"


@pytest.mark.parametrize("heads", HEADS)
def test_attention_threads(ops: Ops, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, width = heads
    rows = samples.attention_rows([(250, 256), (0, 70), (30, 31)], 16)
    cache, query = samples.kv_cache(40, kv_heads, 16, width), torch.randn(77, query_heads, width)
    expected = ops.paged_attention(query, cache, rows, 0.4)
    torch.set_num_threads(2)
    assert torch.equal(ops.paged_attention(query, cache, rows, 0.4), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_recurrence_threads(ops: Ops, shape: MambaShape) -> None:
    layer = Recurrent(ops, shape, 80, 8)
    rows = samples.prefill_rows([71], [False])
    prefill, window = layer.prefill(torch.arange(71), rows), layer.window(torch.arange(71, 74), one_row(3, 2, 3))
    after = [layer.slot(s) for s in (1, 3, 4, 5)]
    torch.set_num_threads(2)
    assert equal(layer.prefill(torch.arange(71), rows), prefill)
    assert equal(layer.window(torch.arange(71, 74), one_row(3, 2, 3)), window)
    assert all(equal(layer.slot(s), expected) for s, expected in zip((1, 3, 4, 5), after, strict=True))


@pytest.mark.parametrize("heads", HEADS)
def test_attention_rows_do_not_meet(any_ops: Ops, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, width = heads
    spans = [(0, 5), (100, 230), (7, 8), (30, 39)] if any_ops.name != "reference" else [(0, 5), (7, 8), (30, 39)]
    rows = samples.attention_rows(spans, 16)
    cache = samples.kv_cache(40, kv_heads, 16, width)
    query = torch.randn(int(rows.cu_tokens[-1]), query_heads, width)
    together = any_ops.paged_attention(query, cache, rows, 0.4)
    bounds = rows.cu_tokens.tolist()
    for r in range(len(spans)):
        part = slice(bounds[r], bounds[r + 1])
        alone = AttentionRows(
            cu_tokens=torch.tensor([0, bounds[r + 1] - bounds[r]], dtype=torch.int32),
            block_table=rows.block_table[r : r + 1],
            num_keys=rows.num_keys[part],
        )
        assert torch.equal(any_ops.paged_attention(query[part], cache, alone, 0.4), together[part])


@pytest.mark.parametrize("first_key", [0, 1])
def test_attention_ignores_keys_it_must_not_see(any_ops: Ops, first_key: int) -> None:
    """Placeholders of a window see as much as the last real token; everything beyond, and key 0 for MTP, may be NaN."""
    rows = samples.attention_rows([(20, 23), (0, 2)], 16, first_key)
    rows.num_keys[1:3] = 21
    cache = samples.kv_cache(6, 2, 16, 8)
    query = torch.randn(5, 4, 8)
    clean = any_ops.paged_attention(query, cache, rows, 0.4)
    poisoned = torch.full_like(cache, torch.nan)
    for r, keys in enumerate((21, 2)):
        for position in range(first_key, keys):
            block = int(rows.block_table[r, position // 16])
            poisoned[block, :, :, position % 16] = cache[block, :, :, position % 16]
    assert torch.equal(any_ops.paged_attention(query, poisoned, rows, 0.4), clean)
    assert bool(clean.isfinite().all())
