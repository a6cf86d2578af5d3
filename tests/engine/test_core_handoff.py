"""Seal on one engine, land on another, the bytes copied by hand from region to region."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core import EngineCore
from engine.request import EngineRequest, FinishedEvent, Landing, ReadyEvent, SealedEvent, StartedEvent
from protocol.errors import StaleMessage
from protocol.regions import Region
from tests.engine.engine_kit import Drive, MakeCore, assert_whole, key, poison, prompt, request


def copy_page(source: Region, page: int, target: Region, to: int) -> None:
    size = source.page_bytes
    assert size == target.page_bytes
    target.memory[to * size : (to + 1) * size] = source.memory[page * size : (page + 1) * size]


def hand_off(sealed: SealedEvent, landing: Landing, source: EngineCore, target: EngineCore) -> None:
    assert sealed.position == landing.position
    assert len(sealed.blocks) == len(landing.blocks)
    for page, to in zip(sealed.blocks, landing.blocks, strict=True):
        copy_page(source.regions[0], page, target.regions[0], to)
    copy_page(source.regions[1], sealed.slot, target.regions[1], landing.slot)


def sealed_on(drive: Drive, name: str | int) -> SealedEvent:
    (event,) = drive.told[key(name)].endings
    assert isinstance(event, SealedEvent)
    return event


def split(make_core: MakeCore, p_config: dict[str, Any], d_config: dict[str, Any], requests: list[EngineRequest]) -> list[list[int]]:
    """All of the requests through one P and one D engine; they meet in D's batch at different steps."""
    p, d = Drive(make_core(**p_config)), Drive(make_core(**d_config))
    poison(p.core)
    poison(d.core)
    for number, each in enumerate(requests):
        landing = d.core.reserve(EngineRequest(key=each.key, token_ids=each.token_ids, origin="remote", sampling=each.sampling))
        assert landing is not None
        p.core.submit(EngineRequest(key=each.key, token_ids=each.token_ids[:-1], origin="seal"))
        p.run()
        hand_off(sealed_on(p, each.key.request_id), landing, p.core, d.core)
        p.core.release(each.key)
        d.core.land(each.key)
        for _ in range(number % 3):
            d.step()
    d.run()
    assert_whole(p.core)
    assert_whole(d.core)
    return [d.told[each.key].tokens for each in requests]


@pytest.mark.parametrize(
    ("k_on_p", "k_on_d", "padding"), [(0, 0, "auto"), (0, 3, "auto"), (3, 0, "always"), (2, 5, "always"), (0, 3, "never")]
)
def test_split_equals_one_engine_whatever_k(make_core: MakeCore, k_on_p: int, k_on_d: int, padding: str) -> None:
    requests = [
        request(length, prompt(length, 4), max_tokens=10, temperature=0.7 * (length % 2), seed=length)
        for length in (2, 3, 4, 5, 8, 9, 16, 21)
    ]
    expected = Drive(make_core()).outputs(requests)
    p_config = {"speculation": k_on_p, "max_prefill_chunk": 6}
    assert split(make_core, p_config, {"speculation": k_on_d, "tail_padding": padding}, requests) == expected


def test_drafts_are_as_good_after_a_hand_off_as_without(make_core: MakeCore) -> None:
    """C11: MTP's KV and the hidden tail came along, so the drafts are the same."""
    tokens = prompt(30, 8)
    local, p, d = Drive(make_core(speculation=3)), Drive(make_core()), Drive(make_core(speculation=3))
    local.outputs([request("x", tokens, max_tokens=30)])
    landing = d.core.reserve(request("x", tokens, origin="remote", max_tokens=30))
    p.core.submit(request("x", tokens[:-1], origin="seal"))
    p.run()
    assert landing is not None
    hand_off(sealed_on(p, "x"), landing, p.core, d.core)
    d.core.land(key("x"))
    d.run()
    assert d.told[key("x")].endings == local.told[key("x")].endings, "steps, proposed and accepted drafts"


def test_blocks_are_told_as_they_fill_and_then_the_seal(make_core: MakeCore) -> None:
    drive = Drive(make_core(max_prefill_chunk=10, block_tokens=4))
    drive.core.submit(request("p", prompt(19), origin="seal"))
    drive.run()
    started, *ready, sealed = drive.events
    assert isinstance(started, StartedEvent)
    assert isinstance(sealed, SealedEvent)
    assert [(event.first_block, len(event.blocks)) for event in ready if isinstance(event, ReadyEvent)] == [(0, 2), (2, 2)]
    assert sum((event.blocks for event in ready if isinstance(event, ReadyEvent)), ()) == sealed.blocks[:4]
    assert sealed.position == 19
    assert len(sealed.blocks) == 5
    assert list(sealed.blocks) == list(range(sealed.blocks[0], sealed.blocks[0] + 5)), "one run, so one copy"
    assert drive.core.load().held_for_peers == 1
    assert not drive.core.has_work()
    drive.core.release(key("p"))
    drive.core.release(key("p"))
    assert_whole(drive.core)


def test_a_reservation_takes_all_or_nothing(make_core: MakeCore) -> None:
    core = make_core(speculation=3, kv_blocks=10, state_slots=12, block_tokens=4)
    first = core.reserve(request("a", prompt(21), origin="remote"))
    assert first is not None
    assert (len(first.blocks), first.position) == (5, 20)
    assert core.load().free_blocks == 3, "the first window's block is there too"
    assert core.reserve(request("b", prompt(17), origin="remote", max_tokens=2)) is None
    assert core.load().free_blocks == 3
    assert core.reserve(request("c", prompt(5), origin="remote")) is not None
    assert core.reserve(request("d", prompt(2), origin="remote")) is None, "no slots"
    core.check_integrity()
    assert core.load().held_for_peers == 2
    assert not core.step(), "a landing request is in no step"
    assert not core.has_work()
    assert core.cancel(key("a"))
    assert core.cancel(key("c"))
    assert_whole(core)


def test_a_late_landing_touches_nothing(make_core: MakeCore) -> None:
    """F31: completions come for requests that are unknown, cancelled, landed already or over."""
    core = make_core()
    drive = Drive(core)
    landing = core.reserve(request("a", prompt(5), origin="remote", max_tokens=3))
    assert landing is not None
    assert core.cancel(key("a"))
    assert not core.cancel(key("a"))
    for name in ("a", "never seen"):
        with pytest.raises(StaleMessage, match="is not waiting for a hand-off"):
            core.land(key(name))
        core.release(key(name))
    assert core.pools.slots.tags[landing.slot] is None
    assert core.reserve(request("a", prompt(5), origin="remote", max_tokens=3)) is not None
    core.pools.slots.tensor[landing.slot] = 0
    core.pools.blocks.tensor[list(landing.blocks)] = 0
    core.land(key("a"))
    with pytest.raises(StaleMessage):
        core.land(key("a"))
    core.release(key("a"))
    drive.run()
    assert [type(event) for event in drive.told[key("a")].endings] == [FinishedEvent]
    with pytest.raises(StaleMessage):
        core.land(key("a"))
    assert_whole(core)


def test_a_landed_request_can_be_preempted_and_replays_to_the_same_tokens(make_core: MakeCore) -> None:
    """F40, A8: the hand-off is gone, but prompt and output are known; who waited in landing was never put out."""
    old, new = request("old", prompt(6), max_tokens=30), request("new", prompt(14, 5), max_tokens=12)
    expected = Drive(make_core()).outputs([old, new])
    p, d = Drive(make_core()), Drive(make_core(speculation=3, kv_blocks=11, block_tokens=4))
    d.core.submit(old)
    d.step()
    landing = d.core.reserve(EngineRequest(key=new.key, token_ids=new.token_ids, origin="remote", sampling=new.sampling))
    assert landing is not None
    p.core.submit(EngineRequest(key=new.key, token_ids=new.token_ids[:-1], origin="seal"))
    p.run()
    for _ in range(3):
        d.step()
    assert d.core.counters()["baton_preemptions_total"] == 0
    hand_off(sealed_on(p, "new"), landing, p.core, d.core)
    d.core.land(new.key)
    d.run()
    assert d.core.counters()["baton_preemptions_total"] == 1
    assert d.core.counters()["baton_prompt_tokens_total"] > 5 + 13, "the replay is computed here"
    assert [d.told[old.key].tokens, d.told[new.key].tokens] == expected
    assert_whole(d.core)


@pytest.mark.parametrize("stage", range(8))
def test_seals_cancelled_at_every_stage_give_their_pages_back(make_core: MakeCore, stage: int) -> None:
    drive = Drive(make_core(max_prefill_chunk=4))
    drive.core.submit(request("stays", prompt(9), origin="seal"))
    drive.core.submit(request("goes", prompt(22), origin="seal"))
    for _ in range(stage):
        drive.step()
    assert drive.core.cancel(key("goes"))
    drive.run()
    assert isinstance(drive.told[key("stays")].endings[0], SealedEvent)
    drive.core.release(key("stays"))
    assert_whole(drive.core)
