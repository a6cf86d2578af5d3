"""One request's life on D: whatever comes in whatever order, one ending for the router, and pages back exactly once and last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.lifecycle import (
    AbandonHandoff,
    BeginHandoff,
    CancelAsked,
    DecodeLife,
    EngineFailed,
    EngineFinished,
    Event,
    FreePages,
    HandoffBroken,
    HandoffClosed,
    HandoffComplete,
    Land,
    Landed,
    LandFailed,
    NotTaken,
    PrefillStarted,
    State,
    Taken,
    TellAdmitted,
    TellCancelled,
    TellFailed,
    TellFinished,
    TellRefused,
    TellTokens,
    TokensOut,
)
from engine.request import FinishedEvent, TokensEvent
from protocol.errors import IllegalTransition
from protocol.ids import RequestId, RequestKey
from protocol.messages import Timing

KEY = RequestKey(RequestId("r"), 0)
TOKENS = TokensEvent(key=KEY, index=0, token_ids=(5,))
FINISHED = FinishedEvent(key=KEY, reason="length", stop_token_id=None, steps=1, proposed_drafts=0, accepted_drafts=0)
COMPLETE = HandoffComplete(
    at=3.0, manifest_at=2.0, prefill=Timing(queue_s=0.25, prefill_s=0.5, transfer_s=0.125), num_bytes=64, cached_tokens=16
)
FETCH, WHOLE, COMPUTE = Taken(1.0, "fetch"), Taken(1.0, "whole", 20), Taken(1.5, "compute")
ENDINGS = (TellRefused, TellFinished, TellFailed, TellCancelled)


class World:
    """What may happen next around one request, and all that was commanded."""

    def __init__(self) -> None:
        self.life = DecodeLife(KEY, arrived_at=0.0)
        self.commands: list[Any] = []
        self.in_engine = False
        self.receiving = False
        """Receives into reserved pages may be posted."""

    def possible(self) -> list[Event]:
        state = self.life.state
        if state is State.ADMITTING:
            return [FETCH, WHOLE, COMPUTE, NotTaken("busy", "no room"), CancelAsked()]
        if state is State.FETCHING:
            return [COMPLETE, HandoffBroken("prefill_lost", "gone"), CancelAsked()]
        if state is State.LANDING:
            return [Landed(4.0), LandFailed("a tag is wrong"), CancelAsked()]
        if state is State.ACTIVE:
            return [
                TokensOut(5.0, TOKENS),
                EngineFinished(FINISHED),
                EngineFailed("a fault"),
                CancelAsked(keep=True),
                PrefillStarted(2.0, 0),
            ]
        return [HandoffClosed(), CancelAsked()]

    def happen(self, event: Event) -> None:
        match event:
            case Taken():
                self.in_engine = True
            case NotTaken() | EngineFailed() | EngineFinished():
                self.in_engine = False
            case HandoffClosed():
                self.receiving = False
            case HandoffComplete():
                self.receiving = False
        for command in self.life.handle(event):
            self.commands.append(command)
            match command:
                case BeginHandoff():
                    self.receiving = True
                case FreePages():
                    assert not self.receiving, "pages went back under a posted receive"
                    self.in_engine = False
                case Land():
                    assert not self.receiving

    def count(self, *kinds: type[Any]) -> int:
        return sum(isinstance(command, kinds) for command in self.commands)


@given(st.data())
def test_one_ending_and_no_leak_in_any_order(data: st.DataObject) -> None:
    world = World()
    for _ in range(20):
        if world.life.state is State.ENDED:
            break
        world.happen(data.draw(st.sampled_from(world.possible())))
    if world.life.state is not State.ENDED:
        world.happen(CancelAsked())
    if world.life.state is State.ABANDONING:
        world.happen(HandoffClosed())
    assert world.life.state is State.ENDED
    assert world.count(*ENDINGS) == 1
    assert isinstance(world.commands[-1], (*ENDINGS, FreePages))
    assert not world.in_engine
    assert world.count(FreePages) <= 1
    assert world.count(AbandonHandoff) <= 1
    assert world.count(Land) <= 1


def test_the_remote_story_and_its_timing() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    assert life.handle(FETCH) == [TellAdmitted(needs_prefill=True), BeginHandoff()]
    assert life.handle(COMPLETE) == [Land()]
    assert life.handle(Landed(3.5)) == []
    timing = Timing(queue_s=0.25, prefill_s=0.5, transfer_s=0.125 + 1.5, decode_wait_s=0.5, transfer_bytes=64)
    assert life.handle(TokensOut(4.0, TOKENS)) == [TellTokens(TOKENS, timing, 16)]
    assert life.handle(TokensOut(4.5, TOKENS)) == [TellTokens(TOKENS)]
    assert life.handle(EngineFinished(FINISHED)) == [TellFinished(FINISHED)]


def test_the_local_story_and_its_timing() -> None:
    life = DecodeLife(KEY, arrived_at=1.0)
    assert life.handle(COMPUTE) == [TellAdmitted(needs_prefill=False)]
    life.handle(PrefillStarted(2.0, 12))
    assert life.handle(TokensOut(4.0, TOKENS)) == [TellTokens(TOKENS, Timing(queue_s=1.0, prefill_s=2.0), 12)]


def test_what_the_cache_has_whole_needs_nobody() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    assert life.handle(WHOLE) == [TellAdmitted(needs_prefill=False)]
    assert life.handle(TokensOut(1.5, TOKENS)) == [TellTokens(TOKENS, Timing(decode_wait_s=0.5), 20)]


def test_an_answer_that_the_router_cut_may_stay_in_the_cache() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    life.handle(WHOLE)
    assert life.handle(CancelAsked(keep=True)) == [TellCancelled(), FreePages(keep=True)]


def test_a_lost_peer_is_told_at_once_and_pages_follow() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    life.handle(FETCH)
    assert life.handle(HandoffBroken("prefill_lost", "gone")) == [TellFailed("prefill_lost", "gone")]
    assert life.handle(CancelAsked()) == []
    assert life.handle(HandoffClosed()) == [FreePages()]


def test_a_cancelled_fetch_gives_pages_back_when_receives_have_ended() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    life.handle(FETCH)
    assert [type(command) for command in life.handle(CancelAsked())] == [TellCancelled, AbandonHandoff]
    assert life.state is State.ABANDONING
    assert life.handle(HandoffClosed()) == [FreePages()]


def test_an_illegal_event_tells_the_story() -> None:
    life = DecodeLife(KEY, arrived_at=0.0)
    life.handle(NotTaken("busy", "no room"))
    with pytest.raises(IllegalTransition, match=r"(?s)Landed is not allowed in state ENDED.*ADMITTING -> ENDED"):
        life.handle(Landed(2.0))
