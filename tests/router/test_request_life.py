"""A request's life: legal moves, one ending, and cancels for every leg that still works."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import IllegalTransition
from protocol.ids import Epoch, RequestId
from protocol.messages import (
    Admitted,
    Cancelled,
    Failed,
    Finished,
    PrefillDone,
    PrefillPlace,
    Refused,
    Timing,
    Tokens,
)
from router.events import (
    ClientGone,
    Command,
    DeadlinePassed,
    Deliver,
    End,
    Ending,
    Event,
    GivenUp,
    Placed,
    Requeue,
    SendAdmit,
    SendCancel,
    SendPrefill,
    StopMatched,
    Unpair,
    WorkerLost,
)
from router.lifecycle import RequestLife, State

D, P = Epoch("d"), Epoch("p")
PLACE = PrefillPlace(worker_id="p0", epoch=P, address="tcp://1.1.1.1:1")


def about(epoch: Epoch = D, generation: int = 0) -> dict[str, Any]:
    return {"epoch": epoch, "request_id": "r", "generation": generation}


ADMITTED = Admitted(**about(), needs_prefill=True)
FIRST = Tokens(**about(), index=0, token_ids=(1, 2))
FINISHED = Finished(**about(), reason="length")
PATH: list[Event] = [Placed(D, PLACE), ADMITTED, FIRST]


def life(steps: int, *, prefill: PrefillPlace | None = PLACE) -> RequestLife:
    """After so many events of the usual path."""
    request = RequestLife(RequestId("r"), max_tokens=10)
    for event in [Placed(D, prefill), *PATH[1:]][:steps]:
        request.handle(event)
    return request


def ending(commands: list[Command]) -> Ending:
    last = commands[-1]
    assert isinstance(last, End)
    return last.ending


def test_usual_path() -> None:
    request = RequestLife(RequestId("r"), max_tokens=10)
    assert request.handle(Placed(D, PLACE)) == [SendAdmit(D, PLACE)]
    assert request.handle(ADMITTED) == [SendPrefill(P, D)]
    assert request.handle(PrefillDone(**about(P), timing=Timing())) == []
    assert request.handle(FIRST) == [Deliver(FIRST)]
    assert request.handle(FINISHED) == [End(Ending("finished", reason="length", finished=FINISHED))]
    assert request.state is State.ENDED


def test_local_prefill_asks_nobody_else() -> None:
    request = life(1, prefill=None)
    assert request.handle(Admitted(**about(), needs_prefill=False)) == []
    assert request.handle(FIRST) == [Deliver(FIRST)]


@pytest.mark.parametrize("code", ["busy", "draining"])
def test_a_busy_worker_sends_it_back_under_a_new_generation(code: Any) -> None:
    request = life(1)
    assert request.handle(Refused(**about(), code=code, message="full")) == [Requeue(D, code)]
    assert request.state is State.WAITING
    assert not request.concerns(ADMITTED)
    request.handle(Placed(Epoch("d2"), None))
    assert request.generation == 1
    assert not request.concerns(ADMITTED)
    assert request.concerns(Admitted(**about(Epoch("d2"), 1), needs_prefill=False))


def test_a_prefill_worker_that_doesnt_know_d_sends_it_back() -> None:
    request = life(2)
    refused = Refused(**about(P), code="decode_lost", message="never heard of it")
    assert request.handle(refused) == [SendCancel(D), Unpair(D, P, "never heard of it"), Requeue(P, "unpaired")]
    assert request.state is State.WAITING
    assert not request.concerns(Cancelled(**about()))


@pytest.mark.parametrize(
    ("steps", "legs"),
    [(0, []), (1, [SendCancel(D)]), (2, [SendCancel(D), SendCancel(P)]), (3, [SendCancel(D)])],
)
def test_a_client_that_leaves_cancels_every_leg_at_every_stage(steps: int, legs: list[Command]) -> None:
    commands = life(steps).handle(ClientGone())
    assert commands[:-1] == legs
    assert ending(commands).kind == "cancelled"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Refused(**about(P), code="busy", message="m"), "busy"),
        (Failed(**about(P), code="internal", message="m"), "internal"),
        (Cancelled(**about(P)), "internal"),
        (WorkerLost(P, "gone"), "prefill_lost"),
    ],
)
def test_prefill_that_fails_ends_the_request_and_cancels_d(event: Event, code: str) -> None:
    commands = life(2).handle(event)
    assert commands[:-1] == [SendCancel(D)]
    assert (ending(commands).kind, ending(commands).code) == ("failed", code)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Failed(**about(), code="transfer_failed", message="m"), "transfer_failed"),
        (Cancelled(**about()), "internal"),
        (WorkerLost(D, "gone"), "decode_lost"),
    ],
)
def test_decode_that_fails_ends_the_request_and_cancels_p(event: Event, code: str) -> None:
    commands = life(2).handle(event)
    assert commands[:-1] == [SendCancel(P)]
    assert ending(commands).code == code


@pytest.mark.parametrize("event", [WorkerLost(P, "gone"), Failed(**about(P), code="internal", message="m"), Cancelled(**about(P))])
def test_once_tokens_come_p_no_longer_matters(event: Event) -> None:
    request = life(3)
    assert request.handle(event) == []
    assert request.state is State.DECODING


@pytest.mark.parametrize(
    "event",
    [
        Tokens(**about(), index=3, token_ids=(1,)),
        Tokens(**about(), index=1, token_ids=(1,)),
        Tokens(**about(), index=2, token_ids=()),
        Tokens(**about(), index=2, token_ids=(1,) * 9),
        Tokens(**about(P), index=2, token_ids=(1,)),
    ],
)
def test_gaps_repeats_and_too_many_tokens_are_failures(event: Event) -> None:
    commands = life(3).handle(event)
    assert commands[0] == SendCancel(D)
    assert ending(commands).code == "internal"


def test_a_stop_string_is_a_good_ending_and_stops_d() -> None:
    assert life(3).handle(StopMatched()) == [SendCancel(D, keep=True), End(Ending("finished", reason="stop"))]


def test_an_illegal_event_tells_the_story() -> None:
    with pytest.raises(IllegalTransition, match=r"FILLING -> DECODING") as caught:
        life(3).handle(ADMITTED)
    assert len(caught.value.story) == 3


def test_other_generations_and_strangers_dont_concern_it() -> None:
    request = life(2)
    assert request.concerns(FIRST)
    assert not request.concerns(Tokens(**about(D, 1), index=0, token_ids=(1,)))
    assert not request.concerns(Tokens(**about(Epoch("stranger")), index=0, token_ids=(1,)))


EVENTS = st.sampled_from(
    [
        Placed(D, PLACE),
        Placed(D, None),
        ADMITTED,
        Refused(**about(), code="busy", message=""),
        Refused(**about(P), code="bad_request", message=""),
        Refused(**about(P), code="decode_lost", message=""),
        FIRST,
        Tokens(**about(), index=2, token_ids=(3,)),
        FINISHED,
        Failed(**about(), code="internal", message=""),
        Failed(**about(P), code="internal", message=""),
        Cancelled(**about()),
        PrefillDone(**about(P), timing=Timing()),
        WorkerLost(D, ""),
        WorkerLost(P, ""),
        ClientGone(),
        DeadlinePassed(),
        StopMatched(),
        GivenUp("internal", ""),
    ]
)


@given(st.lists(EVENTS, max_size=12))
def test_whatever_happens_there_is_at_most_one_ending_and_nothing_after_it(events: list[Event]) -> None:
    request = RequestLife(RequestId("r"), max_tokens=10)
    commands: list[Command] = []
    for event in events:
        if isinstance(event, WorkerLost) and request._role(event.epoch) is None:
            continue  # the shell tells only those whom it concerns
        try:
            commands += request.handle(event)
        except IllegalTransition:
            continue
    ends = [command for command in commands if isinstance(command, End)]
    assert len(ends) == (request.state is State.ENDED)
    assert not ends or commands[-1] is ends[0]
