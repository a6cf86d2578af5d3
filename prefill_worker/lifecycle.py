"""One request's life on a prefill worker: asking, queued, running, sealed, closing, ended. Pure; the worker is its shell.

The router hears exactly one ending: refused, done (sealed), failed or cancelled. What the decode worker hears is the business of the
hand-off (``transfer``), which this machine feeds and closes; the pages go back only when the hand-off says that no send of
theirs is in flight any more.

    ASKING ──Taken──> QUEUED ──Started──> RUNNING ──Sealed──> SEALED ──HandoffOver──> ENDED
       └────────────────┴──────────────────┴── refused, failed, cancelled ──> CLOSING ──┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from engine.request import ReadyEvent, SealedEvent
from protocol.ids import RequestKey
from protocol.lifecycle import Lifecycle
from protocol.messages import ErrorCode, Timing


class State(Enum):
    ASKING = auto()
    """The engine was asked to take it."""
    QUEUED = auto()
    RUNNING = auto()
    SEALED = auto()
    CLOSING = auto()
    """The router has its answer; the hand-off's last sends are still in flight."""
    ENDED = auto()


# ---- events: times are seconds of the worker's monotonic clock -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """The engine took the request."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Started:
    at: float


@dataclass(frozen=True, slots=True)
class BlocksReady:
    ready: ReadyEvent


@dataclass(frozen=True, slots=True)
class Sealed:
    at: float
    sealed: SealedEvent


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine gave up on the request. Its pages stay until FreePages: sends may still read them."""

    message: str


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """By the router, or because the router that asked for this request is gone."""


@dataclass(frozen=True, slots=True)
class HandoffOver:
    """The hand-off has told the peer its ending and no send is in flight."""

    ok: bool
    reason: str


Event = Taken | NotTaken | Started | BlocksReady | Sealed | EngineFailed | CancelAsked | HandoffOver

# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferBlocks:
    """Let the hand-off tell the peer that these blocks may be pulled."""

    ready: ReadyEvent


@dataclass(frozen=True, slots=True)
class OfferSeal:
    """Everything is final: checksums, manifest, lease."""

    sealed: SealedEvent
    timing: Timing


@dataclass(frozen=True, slots=True)
class CloseHandoff:
    """No more: tell the peer, and answer HandoffOver once the sends have ended."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TellRefused:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TellDone:
    timing: Timing


@dataclass(frozen=True, slots=True)
class TellFailed:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TellCancelled:
    pass


@dataclass(frozen=True, slots=True)
class FreePages:
    """Take the request out of the engine, whatever it does there."""


Command = OfferBlocks | OfferSeal | CloseHandoff | TellRefused | TellDone | TellFailed | TellCancelled | FreePages


class PrefillLife(Lifecycle[State, Event, Command]):
    """Made when the engine is asked to take the request, which arrived at ``arrived_at``."""

    def __init__(self, key: RequestKey, arrived_at: float) -> None:
        super().__init__(f"prefill {key}", State.ASKING)
        self._arrived_at = arrived_at
        self._started_at = arrived_at
        self._in_engine = True

    def _on_taken(self, event: Taken) -> list[Command]:
        if self.state is State.ASKING:
            self.state = State.QUEUED
        return []

    def _on_not_taken(self, event: NotTaken) -> list[Command]:
        self._in_engine = False
        if self.state is State.CLOSING:
            return []
        self.state = State.CLOSING
        return [TellRefused(event.code, event.message), CloseHandoff(event.code, event.message)]

    def _on_started(self, event: Started) -> list[Command]:
        if self.state is State.QUEUED:
            self.state = State.RUNNING
            self._started_at = event.at
        return []

    def _on_ready(self, event: BlocksReady) -> list[Command]:
        return [OfferBlocks(event.ready)] if self.state is State.RUNNING else []

    def _on_sealed(self, event: Sealed) -> list[Command]:
        if self.state is State.CLOSING:
            return []
        self.state = State.SEALED
        timing = Timing(queue_s=self._started_at - self._arrived_at, prefill_s=event.at - self._started_at)
        return [TellDone(timing), OfferSeal(event.sealed, timing)]

    def _on_engine_failed(self, event: EngineFailed) -> list[Command]:
        if self.state is State.CLOSING:
            return []
        self.state = State.CLOSING
        return [TellFailed("internal", event.message), CloseHandoff("internal", event.message)]

    def _on_cancel(self, event: CancelAsked) -> list[Command]:
        if self.state is State.CLOSING:
            return []
        told: list[Command] = [] if self.state is State.SEALED else [TellCancelled()]
        self.state = State.CLOSING
        return [*told, CloseHandoff("internal", "the request was cancelled")]

    def _on_handoff_over(self, event: HandoffOver) -> list[Command]:
        unsealed = self.state in (State.ASKING, State.QUEUED, State.RUNNING)
        told: list[Command] = [TellFailed("transfer_failed", event.reason)] if unsealed else []
        self.state = State.ENDED
        return [*told, FreePages()] if self._in_engine else told

    HANDLERS: ClassVar = {
        Taken: _on_taken,
        NotTaken: _on_not_taken,
        Started: _on_started,
        BlocksReady: _on_ready,
        Sealed: _on_sealed,
        EngineFailed: _on_engine_failed,
        CancelAsked: _on_cancel,
        HandoffOver: _on_handoff_over,
    }
    MOVES: ClassVar = {
        State.ASKING: {
            Taken: {State.QUEUED},
            NotTaken: {State.CLOSING},
            CancelAsked: {State.CLOSING},
            HandoffOver: {State.ENDED},
        },
        State.QUEUED: {
            Started: {State.RUNNING},
            EngineFailed: {State.CLOSING},
            CancelAsked: {State.CLOSING},
            HandoffOver: {State.ENDED},
        },
        State.RUNNING: {
            Started: {State.RUNNING},  # again, after a preemption
            BlocksReady: {State.RUNNING},
            Sealed: {State.SEALED},
            EngineFailed: {State.CLOSING},
            CancelAsked: {State.CLOSING},
            HandoffOver: {State.ENDED},
        },
        State.SEALED: {
            CancelAsked: {State.CLOSING},
            HandoffOver: {State.ENDED},
        },
        State.CLOSING: {
            # The engine goes on until the last send has ended and the pages may be taken from it.
            Taken: {State.CLOSING},
            NotTaken: {State.CLOSING},
            Started: {State.CLOSING},
            BlocksReady: {State.CLOSING},
            Sealed: {State.CLOSING},
            EngineFailed: {State.CLOSING},
            CancelAsked: {State.CLOSING},
            HandoffOver: {State.ENDED},
        },
        State.ENDED: {},
    }
