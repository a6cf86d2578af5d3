"""Requests that are there at the same time: they share, wait for each other where that is shorter, and never for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.prefix_cache.leaders import MIN_GAIN, Leader, choose_wait, fork, longest_wait
from tests.cache.cache_kit import ROOMY, cached, expected, family
from tests.engine.engine_kit import Drive, MakeCore, assert_whole, key, prompt, request

BIG_GRID: dict[str, Any] = ROOMY | {"snapshot_tokens": 64}


def computed(core: EngineCore) -> float:
    return core.counters()["baton_prompt_tokens_total"]


def test_the_same_prompt_from_many_at_once_is_computed_once(make_core: MakeCore) -> None:
    drive = Drive(make_core(speculation=3, **BIG_GRID))
    requests = [request(i, prompt(70), max_tokens=4) for i in range(6)]
    outputs = drive.outputs(requests)
    assert outputs == expected(make_core, requests[:1]) * 6
    assert computed(drive.core) == 69
    assert [cached(drive, i) for i in range(6)] == [0] + [69] * 5
    assert drive.core.cache_stats().waits == 5


def test_a_family_waits_for_its_common_beginning_only(make_core: MakeCore) -> None:
    """The first stops where the others part from it, and they all go on from there beside each other."""
    drive = Drive(make_core(speculation=3, **BIG_GRID))
    requests = [request(i, each, max_tokens=4) for i, each in enumerate(family(50, (20, 20, 20, 20)))]
    assert drive.outputs(requests) == expected(make_core, requests)
    assert [cached(drive, i) for i in range(4)] == [0, 48, 48, 48]
    assert computed(drive.core) == 70 + 3 * (70 - 48)


def test_a_long_wait_is_waited_out(make_core: MakeCore) -> None:
    """The bound is set when the wait begins: that little is left to spare in the end doesn't make it shorter."""
    drive = Drive(make_core(**ROOMY | {"max_model_len": 500}))
    requests = [request(i, each, max_tokens=1) for i, each in enumerate(family(400, (9, 9, 9)))]
    drive.outputs(requests)
    assert [cached(drive, i) for i in range(3)] == [0, 400, 400]
    assert computed(drive.core) == 409 + 2 * 9


def test_who_waits_holds_nothing_and_keeps_nobody_from_passing(make_core: MakeCore) -> None:
    drive = Drive(make_core(**BIG_GRID, max_running=2))
    for name, tokens in (("leader", prompt(100)), ("waits", prompt(100)), ("other", prompt(20, 3))):
        drive.core.submit(request(name, tokens, max_tokens=2))
    drive.step()
    assert (drive.core.load().waiting, drive.core.load().running) == (1, 2)
    drive.run()
    ends = [event.key for event in drive.events if type(event).__name__ == "FinishedEvent"]
    assert ends == [key("other"), key("leader"), key("waits")]
    assert cached(drive, "waits") == 99


def test_a_leader_that_leaves_leaves_nobody_behind(make_core: MakeCore) -> None:
    """Cancelled midway: the next one leads, from what there is."""
    drive = Drive(make_core(**ROOMY))
    requests = [request(i, prompt(100), max_tokens=2) for i in range(3)]
    for each in requests:
        drive.core.submit(each)
    for _ in range(3):
        drive.step()
    drive.core.cancel(key(0))
    drive.run()
    assert [cached(drive, i) for i in (1, 2)] == [48, 99]
    assert drive.told[key(1)].tokens == drive.told[key(2)].tokens == expected(make_core, requests[:1])[0]
    assert_whole(drive.core)


def test_leaders_without_a_cache_lead_nobody(make_core: MakeCore) -> None:
    drive = Drive(make_core(**BIG_GRID))
    kinds: list[dict[str, Any]] = [{"use_cache": False}, {"cache_salt": "x"}, {}]
    for index, kind in enumerate(kinds):
        drive.core.submit(replace(request(index, prompt(60), max_tokens=2), **kind))
    drive.step()
    assert drive.core.load().running == 3


def test_who_leaves_nothing_leads_nobody(make_core: MakeCore) -> None:
    """What was admitted before a flush publishes nothing, and without slots for states nobody does: a wait would be in vain."""
    for flush, snapshots in ((True, 8), (False, 0)):
        drive = Drive(make_core(**BIG_GRID, snapshot_slots=snapshots))
        drive.core.submit(request("before", prompt(100), max_tokens=1))
        drive.step()
        if flush:
            drive.core.flush_cache()
        drive.core.submit(request("behind", prompt(100), max_tokens=1))
        drive.step()
        assert drive.core.load().running == 2
        assert drive.core.cache_stats().waits == 0


def test_prefills_that_are_found_whole_keep_no_row_from_those_behind(make_core: MakeCore) -> None:
    """They need no step: one after the other is sealed, though no peer has fetched any yet."""
    drive = Drive(make_core(**ROOMY, max_running=1))
    for name in ("a", "b"):
        drive.core.submit(request(name, prompt(12, ord(name)), origin="seal"))
        drive.run()
        drive.core.release(key(name))
    for name in ("a", "b"):
        drive.core.submit(request(f"{name} again", prompt(12, ord(name)), origin="seal"))
    drive.core.submit(request("new", prompt(9, 5), origin="seal"))
    drive.run()
    assert drive.core.load().held_for_peers == 3


def test_a_prefill_for_a_peer_waits_as_well(make_core: MakeCore) -> None:
    drive = Drive(make_core(**BIG_GRID))
    for name in ("a", "b"):
        drive.core.submit(request(name, prompt(80), origin="seal"))
    drive.run()
    assert computed(drive.core) == 80
    assert [cached(drive, name) for name in ("a", "b")] == [0, 80]


leaders = st.builds(
    lambda arrival, computed, rest, shared: Leader(arrival=arrival, computed=computed, prefill_end=computed + rest, shared=shared),
    st.integers(0, 5), st.integers(0, 300), st.integers(1, 300), st.integers(0, 400),
)  # fmt: skip


@given(some=st.lists(leaders, max_size=4), cached_now=st.integers(0, 200), limit=st.integers(0, 400), size=st.integers(1, 32))
def test_a_wait_is_worth_it_and_can_end(some: list[Leader], cached_now: int, limit: int, size: int) -> None:
    wait = choose_wait(some, cached=cached_now, limit=limit, block_tokens=size)
    if wait is None:
        return
    assert wait.position == limit or wait.position - cached_now >= MIN_GAIN
    assert wait.position <= limit
    assert any(
        wait.position - leader.computed <= wait.position - cached_now
        and leader.computed < wait.position <= min(leader.shared, leader.prefill_end)
        for leader in some
        if leader.arrival == wait.leader
    )
    assert longest_wait(wait.position - cached_now, 256) < 4 + 2 * (limit / 256 + 1)


def test_who_has_waited_long_enough_goes_on_alone(make_core: MakeCore) -> None:
    """A leader that gets one token a step, beside decodes that take the rest: the wait is bounded by steps, not by the leader."""
    drive = Drive(make_core(**ROOMY | {"max_prefill_chunk": 64, "snapshot_tokens": 64}, step_tokens=64, prefill_token_budget=1))
    drive.core.submit(request("decodes", prompt(2, 9), max_tokens=200))
    while key("decodes") not in drive.told or not drive.told[key("decodes")].tokens:
        drive.step()
    for name in ("slow", "waits"):
        drive.core.submit(request(name, prompt(64), max_tokens=1))
    for _ in range(longest_wait(60, 64) + 3):
        drive.step()
    assert drive.core.load().running == 3
    assert drive.core.load().waiting == 0


def test_a_fork_is_a_blocks_end() -> None:
    assert [fork(shared, 16) for shared in (0, 15, 16, 40)] == [0, 0, 16, 32]
