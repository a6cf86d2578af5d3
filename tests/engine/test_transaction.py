"""Invariants 4, 5 and 6: whatever the window, the rejected drafts and the neighbours, what is committed is the truth.

Everything runs on the real model through the real pools, with NaN in every page and slot that is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core import EngineCore
from engine.pools import StatePool
from engine.rows import Row, RowKind, sink_row
from engine.runner import RowOutput, Runner
from engine.transaction import StateTransaction
from protocol.errors import StateAuditError
from tests.engine.engine_kit import KERNELS, VOCAB, MakeCore, poison, prompt

MAX_WIDTH = 8
EXACT = {"native"}
"""Kernels whose prefill and window recurrences round alike, so that an EXTEND is the oracle bit for bit."""


@dataclass
class Lane:
    """One request by hand: its pages, its transaction, and the rows that make it go on."""

    core: EngineCore
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        self.blocks = self.core.pools.blocks.take(self.core.pools.blocks.blocks_for(len(self.tokens) + MAX_WIDTH))
        running, *scratch = self.core.pools.slots.take(1 + MAX_WIDTH)
        self.state = StateTransaction(self.core.pools.slots, running, scratch)
        self.computed = 0

    def prefill(self, count: int) -> Row:
        first, kind = self.computed, RowKind.EXTEND if self.computed else RowKind.START
        slot_in, slot_out = self.state.begin_prefill(first, count, has_state=kind is RowKind.EXTEND)
        return self._row(kind, self.tokens[first : first + count], slot_in, (slot_out,))

    def window(self, token_ids: Sequence[int], width: int) -> Row:
        slot_in, slots_out = self.state.begin_window(self.computed, len(token_ids))
        return self._row(RowKind.VERIFY, token_ids, slot_in, slots_out[:width])

    def commit(self, count: int) -> None:
        self.state.written()
        self.computed = self.state.commit(count)

    def held(self) -> Tensor:
        """The committed state, conv windows, matrix states and hidden tail, and the KV of the computed positions but MTP's."""
        pools = self.core.pools
        assert pools.slots.tags[self.state.running] == self.computed
        assert [pools.slots.tags[slot] for slot in self.state.slots[1:]] == [None] * MAX_WIDTH
        kv = pools.kv(0)[self.blocks].transpose(2, 3).transpose(1, 2).flatten(0, 1)[: self.computed]
        return torch.cat([pools.slots.tensor[self.state.running], kv.flatten()])

    def _row(self, kind: RowKind, token_ids: Sequence[int], slot_in: int, slots_out: Sequence[int]) -> Row:
        return Row(
            kind=kind, first=self.computed, token_ids=token_ids, blocks=self.blocks, slot_in=slot_in, slots_out=slots_out, samples=True
        )


def run(core: EngineCore, rows: Sequence[Row]) -> list[RowOutput]:
    with torch.inference_mode():
        return Runner(core.loaded.model, core.pools).run(rows)


def fresh(make_core: MakeCore, kernels: str, lanes: Sequence[tuple[int, ...]]) -> tuple[EngineCore, list[Lane]]:
    core = make_core(kernels=kernels, kv_blocks=100, state_slots=60)
    core.pools.blocks.tensor.fill_(float("nan"))
    core.pools.slots.tensor.fill_(float("nan"))
    return core, [Lane(core, tokens) for tokens in lanes]


def extended(make_core: MakeCore, kernels: str, tokens: tuple[int, ...], base: int) -> Tensor:
    """What an EXTEND over tokens[base:] leaves, alone in its step."""
    core, (lane,) = fresh(make_core, kernels, [tokens])
    for count in (base, len(tokens) - base):
        run(core, [lane.prefill(count)])
        lane.commit(count)
    return lane.held()


def prefilled(make_core: MakeCore, kernels: str, tokens: tuple[int, ...]) -> Tensor:
    """What a START over all tokens leaves, alone in its step."""
    core, (lane,) = fresh(make_core, kernels, [tokens])
    run(core, [lane.prefill(len(tokens))])
    lane.commit(len(tokens))
    return lane.held()


def assert_same_state(got: Tensor, expected: Tensor, kernels: str) -> None:
    assert torch.isfinite(got).all(), "NaN from a page that is nobody's"
    if kernels in EXACT:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_commit_is_an_extend_over_the_same_tokens(make_core: MakeCore, kernels: str) -> None:
    """All K <= 7, all real, all n; the same bits for every K and every real, and an EXTEND's."""
    for n in range(1, MAX_WIDTH + 1):
        base = (1, 6)[n % 2]
        tokens = prompt(base + MAX_WIDTH)
        expected = extended(make_core, kernels, tokens[: base + n], base)
        first: Tensor | None = None
        for width, real in product(range(n, MAX_WIDTH + 1), range(n, MAX_WIDTH + 1)):
            if real > width:
                continue
            core, (lane,) = fresh(make_core, kernels, [tokens])
            run(core, [lane.prefill(base)])
            lane.commit(base)
            rejected = tuple((token + 1) % VOCAB for token in tokens[base + n : base + real])
            run(core, [lane.window(tokens[base : base + n] + rejected, width)])
            lane.commit(n)
            got = lane.held()
            assert_same_state(got, expected, kernels)
            assert first is None or torch.equal(got, first), f"width {width}, real {real}, n {n}"
            first = got


@pytest.mark.parametrize("kernels", KERNELS)
@settings(deadline=None, max_examples=25, database=None)
@given(data=st.data())
def test_neighbours_change_nothing(make_core: MakeCore, kernels: str, data: st.DataObject) -> None:
    """A window beside prompts of exactly its width, other windows and sink rows: state, KV and logits as if alone."""
    width = data.draw(st.integers(1, MAX_WIDTH), label="width")
    real = data.draw(st.integers(1, width), label="real")
    n = data.draw(st.integers(1, real), label="n")
    base = data.draw(st.integers(1, 9), label="base")
    beside = data.draw(st.lists(st.sampled_from(["prompt", "window", "sink"]), max_size=4), label="beside")
    tokens = prompt(base + real, seed=5)

    def one(neighbours: Sequence[str]) -> tuple[Tensor, Tensor]:
        core, lanes = fresh(make_core, kernels, [tokens, *(prompt(width + 3, seed=9 + i) for i in range(len(neighbours)))])
        lane, others = lanes[0], list(zip(neighbours, lanes[1:], strict=True))
        for each in (lane, *(other for kind, other in others if kind == "window")):
            count = base if each is lane else 3
            run(core, [each.prefill(count)])
            each.commit(count)
        prompts = [other.prefill(width) for kind, other in others if kind == "prompt"]
        windows = [other.window(other.tokens[3:][:width], width) for kind, other in others if kind == "window"]
        sinks = [sink_row(width) for kind, _ in others if kind == "sink"]
        outputs = run(core, [*prompts, *windows, lane.window(tokens[base:], width), *sinks])
        lane.commit(n)
        for kind, other in others:
            if kind == "prompt":
                other.commit(width)
                assert_same_state(other.held(), prefilled(make_core, kernels, other.tokens[:width]), kernels)
        return lane.held(), outputs[len(prompts) + len(windows)].logits

    alone_state, alone_logits = one([])
    state, logits = one(beside)
    assert torch.equal(state, alone_state)
    assert torch.equal(logits, alone_logits)


def test_an_aborted_window_leaves_the_state_as_it_was(make_core: MakeCore) -> None:
    tokens = prompt(12)
    core, (lane,) = fresh(make_core, "torch", [tokens])
    run(core, [lane.prefill(6)])
    lane.commit(6)
    before = lane.held()
    run(core, [lane.window(tokens[6:9], 4)])
    lane.state.written()
    lane.state.abort()
    assert torch.equal(lane.held(), before)


def test_padding_rows_touch_only_the_sinks(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=8, state_slots=8)
    poison(core)
    blocks, slots = core.pools.blocks.tensor[1:].clone(), core.pools.slots.tensor[1:].clone()
    run(core, [sink_row(4), sink_row(4)])
    assert torch.equal(core.pools.blocks.tensor[1:].nan_to_num(7), blocks.nan_to_num(7))
    assert torch.equal(core.pools.slots.tensor[1:].nan_to_num(7), slots.nan_to_num(7))


# --- tags alone, without a model


@pytest.fixture
def slots(make_core: MakeCore) -> StatePool:
    return make_core(state_slots=12).pools.slots


def test_tags_follow_a_window(slots: StatePool) -> None:
    running, *scratch = slots.take(5)
    state = StateTransaction(slots, running, scratch)
    slots.tags[running] = 10
    slot_in, outs = state.begin_window(10, 3)
    assert (slot_in, outs) == (running, tuple(scratch))
    state.written()
    assert [slots.tags[slot] for slot in outs] == [11, 12, 13, None], "a placeholder's state is never tagged"
    assert state.commit(2) == 12
    assert state.running == scratch[1]
    assert slots.tags[state.running] == 12
    assert [slots.tags[slot] for slot in state.slots[1:]] == [None] * 4
    assert sorted(state.slots) == sorted((running, *scratch)), "no slot is lost or doubled"


def test_a_slot_that_holds_another_position_is_refused(slots: StatePool) -> None:
    running, *scratch = slots.take(3)
    state = StateTransaction(slots, running, scratch)
    slots.tags[running] = 7
    with pytest.raises(StateAuditError, match=r"verify: slot \d+ is claimed to hold h\(8\) but its tag is 7"):
        state.begin_window(8, 1)
    with pytest.raises(StateAuditError, match="extend"):
        state.begin_prefill(6, 4, has_state=True)
    state.begin_window(7, 2)
    with pytest.raises(StateAuditError, match=r"commit: slot \d+ is claimed to hold h\(9\) but its tag is None"):
        state.commit(2)


def test_a_prefill_in_flight_holds_nothing(slots: StatePool) -> None:
    (running,) = slots.take(1)
    state = StateTransaction(slots, running, ())
    state.begin_prefill(0, 5, has_state=False)
    assert slots.tags[running] is None
    state.written()
    assert state.commit(5) == slots.tags[running] == 5
    state.begin_prefill(5, 3, has_state=True)
    state.abort()
    assert slots.tags[running] is None, "written over in place: what it holds is not known"


@settings(deadline=None, database=None)
@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=12))
def test_the_transaction_counts_like_a_counter(make_core: MakeCore, steps: list[tuple[int, int, bool]]) -> None:
    slots = make_core(state_slots=12).pools.slots
    owned = slots.take(5)
    state, position = StateTransaction(slots, owned[0], owned[1:]), 3
    slots.tags[owned[0]] = position
    for real, n, aborted in steps:
        state.begin_window(position, real)
        state.written()
        if aborted:
            state.abort()
        else:
            position = state.commit(min(n, real))
        assert {slot: slots.tags[slot] for slot in owned} == {slot: position if slot == state.running else None for slot in owned}
        assert sorted(state.slots) == sorted(owned)
