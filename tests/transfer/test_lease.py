"""Leases: a clock that is passed in, ends that are told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId, RequestKey
from transfer.lease import Leases


def key(index: int) -> RequestKey:
    return RequestKey(RequestId(f"r{index}"), 0)


def test_an_ended_lease_is_told_once() -> None:
    leases = Leases()
    leases.grant(key(1), now=10.0, seconds=1.0)
    assert leases.take_ended(10.9) == []
    assert leases.take_ended(11.0) == [key(1)]
    assert leases.take_ended(99.0) == []
    assert len(leases) == 0


def test_a_renewed_lease_gets_longer_never_shorter() -> None:
    leases = Leases()
    leases.grant(key(1), now=0.0, seconds=10.0)
    leases.grant(key(1), now=1.0, seconds=2.0)
    assert leases.take_ended(9.9) == []
    leases.grant(key(1), now=9.9, seconds=10.0)
    assert leases.next_deadline() == 19.9
    assert leases.take_ended(19.8) == []


def test_a_long_lease_in_front_does_not_hide_the_abandoned_ones_behind_it() -> None:
    leases = Leases()
    leases.grant(key(0), now=0.0, seconds=1000.0)
    for index in range(1, 101):
        leases.grant(key(index), now=0.0, seconds=1.0)
    leases.grant(key(0), now=0.5, seconds=1000.0)
    assert len(leases.take_ended(2.0)) == 100
    assert len(leases) == 1


def test_a_lease_that_is_not_needed_any_more_does_not_end() -> None:
    leases = Leases()
    leases.grant(key(1), now=0.0, seconds=1.0)
    leases.end(key(1))
    leases.end(key(1))
    assert leases.take_ended(5.0) == []
    assert leases.next_deadline() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100), st.floats(0.1, 50)), max_size=20), st.floats(0, 200))
def test_exactly_the_leases_past_their_deadline_end(grants: list[tuple[int, float, float]], now: float) -> None:
    leases = Leases()
    deadlines: dict[RequestKey, float] = {}
    for index, at, seconds in grants:
        leases.grant(key(index), at, seconds)
        deadlines[key(index)] = max(at + seconds, deadlines.get(key(index), 0.0))
    assert set(leases.take_ended(now)) == {who for who, deadline in deadlines.items() if deadline <= now}
    assert len(leases) == sum(deadline > now for deadline in deadlines.values())
