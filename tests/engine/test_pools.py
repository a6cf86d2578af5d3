"""Pages: runs of free ones, layouts, views, and an integrity check that finds what is wrong."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.ledger import FreeRuns, Ledger
from engine.models.dims import ModelDims
from engine.pools import Pools
from protocol.errors import StateAuditError

DIMS = ModelDims(
    hidden=6, vocab=11, max_position=64, num_attention_layers=2, num_mtp_attention_layers=1, attention_heads=4, kv_heads=2, head_dim=3,
    num_recurrent_layers=2, ssm_heads=2, ssm_head_dim=3, ssm_state=5, ssm_groups=1, conv_kernel=4, conv_pieces=(6, 5, 5),
)  # fmt: skip


def pools(num_blocks: int = 7, num_slots: int = 6, dtype: torch.dtype = torch.float32) -> Pools:
    return Pools(DIMS, num_blocks, num_slots, 4, dtype)


@given(count=st.integers(0, 20), data=st.data())
def test_free_runs_are_a_set_of_pages(count: int, data: st.DataObject) -> None:
    runs, model, held = FreeRuns(1, count), set(range(1, count + 1)), set[int]()
    for _ in range(data.draw(st.integers(0, 15))):
        give: bool = data.draw(st.booleans())
        if held and give:
            back = set(data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)))
            runs.give(back)
            held, model = held - back, model | back
        else:
            wanted: int = data.draw(st.integers(0, len(model)))
            taken = runs.take(wanted, data.draw(st.none() | st.integers(0, count)))
            assert len(taken) == len(set(taken)) == wanted
            assert set(taken) <= model
            held, model = held | set(taken), model - set(taken)
        assert runs.ids() == sorted(model)
        assert runs.count == len(model)


def test_pages_come_in_ascending_runs_behind_the_owners_last_one() -> None:
    runs = FreeRuns(1, 12)
    assert runs.take(3) == [1, 2, 3]
    assert runs.take(2, after=3) == [4, 5]
    runs.give([2, 3])
    assert runs.take(2) == [2, 3], "the run that fits best, so that long ones stay whole"
    assert runs.take(4) == [6, 7, 8, 9]
    runs.give([1, 3, 5, 7, 6])
    assert runs.take(3) == [5, 6, 7], "given back pages are one run again"


def test_a_page_given_back_twice_is_caught() -> None:
    runs = FreeRuns(1, 5)
    runs.give(runs.take(3))
    for page in (1, 3, 5):
        with pytest.raises(AssertionError, match="twice"):
            runs.give([page])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_regions_describe_the_bytes_that_the_views_show(dtype: torch.dtype) -> None:
    made = pools(dtype=dtype)
    views = {f"kv.{i}": made.kv(i) for i in range(2)} | {"mtp_kv.0": made.kv(2), "hidden": made.slots.hidden}
    views |= {f"conv.{i}": made.conv(i) for i in range(2)} | {f"ssm.{i}": made.ssm(i) for i in range(2)}
    for region in made.regions():
        assert len(region.memory) == region.num_pages * region.page_bytes
        assert sum(part.num_bytes for part in region.parts) == region.page_bytes
        for number, part in enumerate(region.parts, start=1):
            views[part.name][3] = number
            start = 3 * region.page_bytes + part.offset
            told = torch.frombuffer(region.memory[start : start + part.num_bytes], dtype=dtype)
            assert part.dtype == str(dtype).removeprefix("torch.")
            assert told.tolist() == [number] * told.numel()
            assert tuple(views[part.name].shape[1:]) == part.shape
            if part.partition_pieces:
                assert part.partition_axis is not None
                assert sum(part.partition_pieces) == part.shape[part.partition_axis]


def test_slots_come_empty_and_a_tag_is_checked() -> None:
    slots = pools().slots
    (slot,) = slots.take(1)
    with pytest.raises(StateAuditError, match=rf"seal: slot {slot} is claimed to hold h\(5\) but its tag is None"):
        slots.audit(slot, 5, "seal")
    slots.tags[slot] = 5
    slots.audit(slot, 5, "seal")
    slots.give([slot])
    assert slots.tags[slot] is None


def test_integrity_names_lost_doubled_and_foreign_pages() -> None:
    made = pools()
    blocks, (slot,) = made.blocks.take(3), made.slots.take(1)
    made.check_integrity([blocks], [[slot]])
    with pytest.raises(AssertionError, match=r"block 1 counts \(users, keeps\) \(1, 0\), but has \(0, 0\)"):
        made.check_integrity([], [[slot]])
    with pytest.raises(AssertionError, match=r"block 3 counts .* but has \(2, 0\)"):
        made.check_integrity([blocks, blocks[2:]], [[slot]])
    with pytest.raises(AssertionError, match=r"slot 2 counts .* but has \(1, 0\)"):
        made.check_integrity([blocks], [[slot, 2]])
    made.slots.share([slot])
    with pytest.raises(AssertionError, match="a slot has two owners"):
        made.check_integrity([blocks], [[slot], [slot]])
    made.slots.give([slot])
    made.slots.tags[4] = 9
    with pytest.raises(AssertionError, match="slot 4 is nobody's but has tag 9"):
        made.check_integrity([blocks], [[slot]])


@given(seed=st.integers(0, 2**32), moves=st.lists(st.sampled_from(["take", "share", "give", "keep", "drop"]), max_size=40))
def test_pages_are_free_used_or_idle_and_idle_ones_are_available(seed: int, moves: list[str]) -> None:
    """Random users and keeps of a ledger whose cache drops whatever is idle when pages are asked for."""
    ledger, draw = Ledger(8), random.Random(seed)
    used: list[int] = []
    kept: list[int] = []

    def reclaim(count: int) -> None:
        for page in [page for page in kept if page not in used]:
            if count > 0:
                kept.remove(page)
                count -= ledger.drop(page)

    ledger.reclaim = reclaim
    for move in moves:
        there = sorted({*used, *kept})
        match move:
            case "take":
                used += ledger.take(draw.randint(0, ledger.num_available))
            case "share" if there:
                used.append(draw.choice(there))
                ledger.share(used[-1:])
            case "keep" if there:
                kept.append(draw.choice(there))
                ledger.keep(kept[-1])
            case "give" if used:
                ledger.give([used.pop(draw.randrange(len(used)))])
            case "drop" if kept:
                ledger.drop(kept.pop(draw.randrange(len(kept))))
        ledger.check("page", [used], kept)
        assert ledger.num_available == 7 - len(set(used))
