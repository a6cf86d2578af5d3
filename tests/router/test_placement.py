"""Which workers are chosen: a pure function, so a table of snapshots."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import Epoch
from router.placement import DecodeView, Needs, NoPlace, Place, PrefillView, has_room, place


def prefill(name: str, **changes: Any) -> PrefillView:
    values: dict[str, Any] = {"worker_id": name, "epoch": Epoch(name), "draining": False, "booked_tokens": 0}
    return PrefillView(**(values | changes))


def decode(name: str, paired: str = "", **changes: Any) -> DecodeView:
    values: dict[str, Any] = {
        "worker_id": name,
        "epoch": Epoch(name),
        "draining": False,
        "reachable": True,
        "num_running": 0,
        "max_running": 4,
        "max_tokens": 1000,
        "booked_tokens": 0,
        "refused_tokens": None,
        "paired": frozenset(Epoch(peer) for peer in paired.split()),
    }
    return DecodeView(**(values | changes))


def needs(**changes: Any) -> Needs:
    values: dict[str, Any] = {"num_prompt_tokens": 10, "max_tokens": 100, "local": False}
    return Needs(**(values | changes))


def test_one_whose_connection_is_gone_is_as_good_as_full() -> None:
    gone = decode("d0", "", reachable=False)
    found = place([], [gone], needs())
    assert isinstance(found, NoPlace)
    assert found.kind == "full"
    assert place([], [gone, decode("d1", "", num_running=3)], needs()) == Place(Epoch("d1"), None)


def test_least_loaded_of_each() -> None:
    prefills = [prefill("p0", booked_tokens=500), prefill("p1", booked_tokens=10)]
    decodes = [decode("d0", "p0 p1", num_running=2), decode("d1", "p0 p1", num_running=1)]
    assert place(prefills, decodes, needs()) == Place(Epoch("d1"), Epoch("p1"))


def test_load_is_relative_to_size() -> None:
    assert place([], [decode("d0", num_running=2, max_running=4), decode("d1", num_running=3, max_running=16)], needs()) == Place(
        Epoch("d1"), None
    )


def test_only_paired_workers_go_together() -> None:
    prefills = [prefill("p0"), prefill("p1", booked_tokens=900)]
    assert place(prefills, [decode("d0", "p1")], needs()) == Place(Epoch("d0"), Epoch("p1"))


def test_a_paired_decode_worker_is_better_than_an_idle_one() -> None:
    assert place([prefill("p0")], [decode("d0"), decode("d1", "p0", num_running=3)], needs()) == Place(Epoch("d1"), Epoch("p0"))


def test_without_prefill_workers_decode_prefills() -> None:
    assert place([], [decode("d0")], needs()) == Place(Epoch("d0"), None)
    assert place([prefill("p0", draining=True)], [decode("d0", "p0")], needs()) == Place(Epoch("d0"), None)


def test_local_needs_no_prefill_worker() -> None:
    assert place([prefill("p0")], [decode("d0", "p0")], needs(local=True)) == Place(Epoch("d0"), None)


def test_full_is_worth_waiting_for() -> None:
    for view in (decode("d0", num_running=4), decode("d0", refused_tokens=100)):
        choice = place([], [view], needs())
        assert isinstance(choice, NoPlace)
        assert choice.kind == "full"


def test_a_smaller_request_is_tried_where_a_larger_one_was_refused() -> None:
    assert place([], [decode("d0", refused_tokens=101)], needs(max_tokens=100)) == Place(Epoch("d0"), None)


def test_busy_workers_are_not_asked_twice() -> None:
    assert place([], [decode("d0"), decode("d1", num_running=3)], needs(tried=frozenset({Epoch("d0")}))) == Place(Epoch("d1"), None)


def test_a_pair_that_refused_this_request_isnt_asked_again() -> None:
    prefills, decodes = [prefill("p0")], [decode("d0", "p0"), decode("d1", "p0", num_running=3)]
    bad = frozenset({(Epoch("d0"), Epoch("p0"))})
    assert place(prefills, decodes, needs(refused_pairs=bad)) == Place(Epoch("d1"), Epoch("p0"))
    assert place(prefills, decodes[:1], needs(refused_pairs=bad)) == Place(Epoch("d0"), None)


def test_whether_it_is_worth_going_through_the_queue() -> None:
    full, gone, leaving = decode("d0", num_running=4), decode("d1", reachable=False), decode("d2", draining=True)
    assert not has_room([full, gone, leaving])
    assert has_room([full, decode("d3")])
    assert has_room([])
    assert has_room([leaving])


def test_nobody_says_why() -> None:
    for decodes, reason in (
        ([], "no decode worker"),
        ([decode("d0", draining=True)], "draining"),
        ([decode("d0", max_tokens=50)], "holds 100 tokens; the largest holds 50"),
    ):
        choice = place([], decodes, needs())
        assert isinstance(choice, NoPlace)
        assert choice.kind == "nobody"
        assert reason in choice.reason


@given(
    running=st.lists(st.integers(min_value=0, max_value=4), max_size=4),
    paired=st.lists(st.booleans(), min_size=4, max_size=4),
    draining=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_choice_always_has_room_and_is_paired(running: list[int], paired: list[bool], draining: list[bool]) -> None:
    decodes = [
        decode(f"d{place}", "p0" if paired[place] else "", num_running=count, draining=draining[place])
        for place, count in enumerate(running)
    ]
    choice = place([prefill("p0")], decodes, needs())
    free = {view.epoch: view for view in decodes if view.num_running < view.max_running and not view.draining}
    if isinstance(choice, NoPlace):
        assert not free
    else:
        assert choice.prefill is None or choice.prefill in free[choice.decode].paired
        assert choice.prefill is not None or not any(view.paired for view in free.values())
