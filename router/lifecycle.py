"""One request's life in the router: waiting, admitting, filling, decoding, ended. Pure; ``router.cluster`` is the shell.

    WAITING ──Placed──> ADMITTING ──Admitted──> FILLING ──Tokens──> DECODING ──Finished, StopMatched──> ENDED
       ├─ busy, undelivered ┘               │  (P or D computes the prompt)
       └─ P doesn't know D ─────────────────┘

Every state can also end by failure, a lost worker, a client that left, or the deadline. There is exactly one ``End`` command, it is
the last one, and the legs that still work for the request are cancelled before it. Each placement is a new generation: what workers
of an earlier one still say doesn't concern the request any more (``concerns``) and never reaches ``handle``.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from protocol.ids import Epoch, RequestId
from protocol.lifecycle import Lifecycle
from protocol.messages import (
    Admitted,
    Cancelled,
    ErrorCode,
    Failed,
    Finished,
    PrefillDone,
    PrefillPlace,
    Refused,
    RequestMessage,
    Role,
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
    FailCode,
    GivenUp,
    Placed,
    Requeue,
    SendAdmit,
    SendCancel,
    SendPrefill,
    SparePrefill,
    StopMatched,
    Undelivered,
    Unpair,
    WorkerLost,
)


class State(Enum):
    __hash__ = object.__hash__  # Enum's own is Python code, and states are looked up for every token

    WAITING = auto()
    """On no worker: not placed yet, or sent back."""
    ADMITTING = auto()
    """D was asked."""
    FILLING = auto()
    """D has room; the prompt is being computed, by P or by D."""
    DECODING = auto()
    """Tokens have come."""
    ENDED = auto()


class RequestLife(Lifecycle[State, Event, Command]):
    """Of one generated sequence: an HTTP request with ``n`` or several prompts has several."""

    def __init__(self, request_id: RequestId, max_tokens: int) -> None:
        super().__init__(f"request {request_id}", State.WAITING)
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.generation = -1
        """Of the current placement; -1 before the first."""
        self.decode: Epoch | None = None
        self.prefill: PrefillPlace | None = None
        self.num_tokens = 0
        """Output tokens so far."""

    def concerns(self, message: RequestMessage) -> bool:
        """Whether the message is about the current placement and from one of its workers."""
        return message.generation == self.generation and self._role(message.epoch) is not None

    def _role(self, epoch: Epoch) -> Role | None:
        if epoch == self.decode:
            return "decode"
        return "prefill" if self.prefill is not None and epoch == self.prefill.epoch else None

    # ---- one method per event

    def _placed(self, event: Placed) -> list[Command]:
        self.generation += 1
        self.decode, self.prefill = event.decode, event.prefill
        self.state = State.ADMITTING
        return [SendAdmit(event.decode, event.prefill)]

    def _admitted(self, event: Admitted) -> list[Command]:
        if self._role(event.epoch) != "decode":
            return self._broken(f"the {self._role(event.epoch)} worker admitted a request that it wasn't asked to decode")
        self.state = State.FILLING
        assert self.decode is not None
        if self.prefill is None:
            return self._broken("nobody was to prefill, and D says that somebody must") if event.needs_prefill else []
        if event.needs_prefill:
            return [SendPrefill(self.prefill.epoch, self.decode)]
        spared, self.prefill = self.prefill.epoch, None
        return [SparePrefill(spared)]

    def _refused(self, event: Refused) -> list[Command]:
        asked = "decode" if self.state is State.ADMITTING else "prefill"
        if self._role(event.epoch) != asked:
            return self._broken(f"the {self._role(event.epoch)} worker refused what it wasn't asked ({event.message})")
        if asked == "decode" and event.code in ("busy", "draining"):
            self.state, self.decode, self.prefill = State.WAITING, None, None
            return [Requeue(event.epoch, "draining" if event.code == "draining" else "busy")]
        if asked == "prefill" and event.code == "decode_lost":
            return self._unpaired(event)
        return self._fail(event.code, event.message, gone=event.epoch)

    def _unpaired(self, event: Refused) -> list[Command]:
        """Nothing is computed yet: D gives its room back, and the request is placed anew."""
        assert self.decode is not None
        commands = [*self._cancel_legs(gone=event.epoch), Unpair(self.decode, event.epoch, event.message), Requeue(event.epoch, "unpaired")]
        self.state, self.decode, self.prefill = State.WAITING, None, None
        return commands

    def _undelivered(self, event: Undelivered) -> list[Command]:
        assert event.epoch == self.decode
        self.state, self.decode, self.prefill = State.WAITING, None, None
        return [Requeue(event.epoch, "unreachable")]

    def _tokens(self, event: Tokens) -> list[Command]:
        if event.epoch != self.decode:
            return self._broken(f"the {self._role(event.epoch)} worker sends tokens but doesn't decode")
        if event.index != self.num_tokens or not event.token_ids:
            return self._broken(f"tokens {event.index}+{len(event.token_ids)} after {self.num_tokens}: a gap or a repeat")
        self.num_tokens += len(event.token_ids)
        if self.num_tokens > self.max_tokens:
            return self._broken(f"{self.num_tokens} tokens where {self.max_tokens} were asked for")
        self.state = State.DECODING
        return [Deliver(event)]

    def _finished(self, event: Finished) -> list[Command]:
        if event.epoch != self.decode:
            return self._broken(f"the {self._role(event.epoch)} worker says finished but doesn't decode")
        return self._end(Ending("finished", reason=event.reason, finished=event))

    def _failed(self, event: Failed) -> list[Command]:
        if self._done_with(event.epoch):
            return []
        return self._fail(event.code, event.message, gone=event.epoch)

    def _cancelled(self, event: Cancelled) -> list[Command]:
        """Unasked: after our own Cancel the request is over and hears nothing."""
        if self._done_with(event.epoch):
            return []
        return self._fail("internal", f"the {self._role(event.epoch)} worker dropped the request", gone=event.epoch)

    def _prefill_done(self, event: PrefillDone) -> list[Command]:
        if self._role(event.epoch) != "prefill":
            return self._broken(f"the {self._role(event.epoch)} worker says prefill done but doesn't prefill")
        return []

    def _worker_lost(self, event: WorkerLost) -> list[Command]:
        role = self._role(event.epoch)
        assert role is not None, "the shell tells only those whom it concerns"
        if self._done_with(event.epoch):
            return []
        code: ErrorCode = "decode_lost" if role == "decode" else "prefill_lost"
        return self._fail(code, f"the {role} worker was lost: {event.reason}", gone=event.epoch)

    def _client_gone(self, event: ClientGone) -> list[Command]:
        return [*self._cancel_legs(), *self._end(Ending("cancelled", message="the client left"))]

    def _deadline_passed(self, event: DeadlinePassed) -> list[Command]:
        return self._fail("deadline", f"not finished in time, while {self.state.name.lower()}")

    def _stop_matched(self, event: StopMatched) -> list[Command]:
        assert self.decode is not None
        return [SendCancel(self.decode, keep=True), *self._end(Ending("finished", reason="stop"))]

    def _given_up(self, event: GivenUp) -> list[Command]:
        return self._fail(event.code, event.message)

    # ---- endings

    def _done_with(self, epoch: Epoch) -> bool:
        """P's part is over once D has sent a token: whatever happens to P afterwards."""
        return self.state is State.DECODING and self._role(epoch) == "prefill"

    def _broken(self, what: str) -> list[Command]:
        return self._fail("internal", f"a worker broke the protocol: {what}")

    def _fail(self, code: FailCode, message: str, *, gone: Epoch | None = None) -> list[Command]:
        return [*self._cancel_legs(gone), *self._end(Ending("failed", code=code, message=message))]

    def _end(self, ending: Ending) -> list[Command]:
        self.state = State.ENDED
        return [End(ending)]

    def _cancel_legs(self, gone: Epoch | None = None) -> list[Command]:
        """To every worker that may still work for this placement, except ``gone``, which has ended its part itself."""
        legs: list[Epoch] = []
        if self.decode is not None:
            legs.append(self.decode)
        if self.prefill is not None and self.state is State.FILLING:
            legs.append(self.prefill.epoch)
        return [SendCancel(epoch) for epoch in legs if epoch != gone]

    _LEAVING: ClassVar = {
        ClientGone: {State.ENDED},
        DeadlinePassed: {State.ENDED},
        GivenUp: {State.ENDED},
    }
    _PLACED: ClassVar = {WorkerLost: {State.ENDED}, **_LEAVING}
    MOVES: ClassVar = {
        State.WAITING: {Placed: {State.ADMITTING}, **_LEAVING},
        State.ADMITTING: {
            Admitted: {State.FILLING, State.ENDED},
            Undelivered: {State.WAITING},
            Refused: {State.WAITING, State.ENDED},
            Failed: {State.ENDED},
            Cancelled: {State.ENDED},
            **_PLACED,
        },
        State.FILLING: {
            Tokens: {State.DECODING, State.ENDED},
            PrefillDone: {State.FILLING, State.ENDED},
            Refused: {State.WAITING, State.ENDED},
            Failed: {State.ENDED},
            Cancelled: {State.ENDED},
            **_PLACED,
        },
        State.DECODING: {
            Tokens: {State.DECODING, State.ENDED},
            Finished: {State.ENDED},
            StopMatched: {State.ENDED},
            PrefillDone: {State.DECODING, State.ENDED},
            Failed: {State.DECODING, State.ENDED},
            Cancelled: {State.DECODING, State.ENDED},
            **_PLACED,
            WorkerLost: {State.DECODING, State.ENDED},
        },
        State.ENDED: {},
    }
    HANDLERS: ClassVar = {
        Placed: _placed,
        Admitted: _admitted,
        Refused: _refused,
        Undelivered: _undelivered,
        Tokens: _tokens,
        Finished: _finished,
        Failed: _failed,
        Cancelled: _cancelled,
        PrefillDone: _prefill_done,
        WorkerLost: _worker_lost,
        ClientGone: _client_gone,
        DeadlinePassed: _deadline_passed,
        StopMatched: _stop_matched,
        GivenUp: _given_up,
    }
