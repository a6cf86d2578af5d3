"""One request's life on P: whatever comes in whatever order, one ending for the router, and pages back exactly once and last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import ReadyEvent, SealedEvent
from prefill_worker.lifecycle import (
    BlocksReady,
    CancelAsked,
    CloseHandoff,
    EngineFailed,
    Event,
    FreePages,
    HandoffOver,
    NotTaken,
    OfferBlocks,
    OfferSeal,
    PrefillLife,
    Sealed,
    Started,
    State,
    Taken,
    TellCancelled,
    TellDone,
    TellFailed,
    TellRefused,
)
from protocol.errors import IllegalTransition
from protocol.ids import RequestId, RequestKey
from protocol.messages import Timing

KEY = RequestKey(RequestId("r"), 0)
READY = ReadyEvent(key=KEY, first_block=0, blocks=(3,))
SEALED = SealedEvent(key=KEY, position=20, blocks=(3, 4), slot=1)
OVER = HandoffOver(ok=True, reason="released")
ENDINGS = (TellRefused, TellDone, TellFailed, TellCancelled)


class World:
    """What the shell and its surroundings may do next, and all that was commanded."""

    def __init__(self) -> None:
        self.life = PrefillLife(KEY, arrived_at=10.0)
        self.commands: list[Any] = []
        self.in_engine = True
        self.progress = 0
        self.handoff_open = True

    def possible(self) -> list[Event]:
        events: list[Event] = []
        if self.life.state is not State.ENDED:
            events.append(CancelAsked())
        if self.in_engine and self.progress == 0:
            events += [Taken(), NotTaken("bad_request", "too long")]
        elif self.in_engine and self.progress < 4:
            events += [(Started(11.0), BlocksReady(READY), Sealed(13.0, SEALED))[self.progress - 1], EngineFailed("a fault")]
        if self.handoff_open:
            events.append(HandoffOver(ok=self.progress == 4, reason="over"))
        return events

    def happen(self, event: Event) -> None:
        match event:
            case HandoffOver():
                self.handoff_open = False
            case NotTaken():
                self.in_engine = False
            case EngineFailed():
                self.progress = 4
            case Taken() | Started() | BlocksReady() | Sealed():
                self.progress += 1
        commands = self.life.handle(event)
        self.commands += commands
        if any(isinstance(command, FreePages) for command in commands):
            assert not self.handoff_open, "pages went back while sends may be in flight"
            assert self.in_engine, "pages went back twice"
            self.in_engine = False

    def count(self, *kinds: type[Any]) -> int:
        return sum(isinstance(command, kinds) for command in self.commands)


@given(st.data())
def test_one_ending_and_no_leak_in_any_order(data: st.DataObject) -> None:
    world = World()
    for _ in range(14):
        if world.life.state is State.ENDED:
            break
        world.happen(data.draw(st.sampled_from(world.possible())))
    if world.life.state is not State.ENDED:
        if world.count(CloseHandoff) == 0:
            world.happen(CancelAsked())
        world.happen(OVER)
    assert world.life.state is State.ENDED
    assert world.count(*ENDINGS) == 1
    assert not world.in_engine
    assert world.count(FreePages) <= 1
    assert world.count(CloseHandoff) <= 1


def test_the_plain_story() -> None:
    life = PrefillLife(KEY, arrived_at=10.0)
    assert life.handle(Taken()) == []
    assert life.handle(Started(10.5)) == []
    assert life.handle(BlocksReady(READY)) == [OfferBlocks(READY)]
    timing = Timing(queue_s=0.5, prefill_s=1.5)
    assert life.handle(Sealed(12.0, SEALED)) == [TellDone(timing), OfferSeal(SEALED, timing)]
    assert life.handle(OVER) == [FreePages()]
    assert life.state is State.ENDED


def test_cancel_waits_for_sends() -> None:
    life = PrefillLife(KEY, arrived_at=0.0)
    life.handle(Taken())
    life.handle(Started(1.0))
    assert [type(command) for command in life.handle(CancelAsked())] == [TellCancelled, CloseHandoff]
    assert life.handle(Sealed(2.0, SEALED)) == []
    assert life.handle(OVER) == [FreePages()]


def test_lost_peer_fails_the_request_and_stops_the_engine() -> None:
    life = PrefillLife(KEY, arrived_at=0.0)
    life.handle(Taken())
    life.handle(Started(1.0))
    commands = life.handle(HandoffOver(ok=False, reason="the decode worker is gone"))
    assert commands == [TellFailed("transfer_failed", "the decode worker is gone"), FreePages()]


def test_an_illegal_event_tells_the_story() -> None:
    life = PrefillLife(KEY, arrived_at=0.0)
    life.handle(OVER)
    with pytest.raises(IllegalTransition, match=r"(?s)Sealed is not allowed in state ENDED.*ASKING -> ENDED"):
        life.handle(Sealed(2.0, SEALED))


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_its_moves(state: State) -> None:
    for event, targets in PrefillLife.MOVES[state].items():
        assert event in PrefillLife.HANDLERS
        assert targets <= set(State)


def test_offers_stop_after_cancel() -> None:
    life = PrefillLife(KEY, arrived_at=0.0)
    life.handle(Taken())
    life.handle(Started(1.0))
    life.handle(CancelAsked())
    assert life.handle(BlocksReady(READY)) == []
    assert not any(isinstance(command, OfferSeal) for command in life.handle(Sealed(2.0, SEALED)))
