"""One request's life on a decode worker: admitting, fetching, landing, active, abandoning, ended. Pure; the worker is its shell.

The router hears exactly one ending: refused, finished, failed or cancelled. It hears it at once; reserved pages may come back a
little later, when the hand-off's receives have really ended (ABANDONING).

    ADMITTING ──Taken(fetch)──> FETCHING ──HandoffComplete──> LANDING ──Landed──> ACTIVE ──EngineFinished──> ENDED
        │                          └── failed, cancelled ──> ABANDONING ──HandoffClosed──────────────────────┘
        └──Taken(whole: the cache has it; compute: local prefill)───────────────────> ACTIVE
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Literal

from engine.request import FinishedEvent, TokensEvent
from protocol.ids import RequestKey
from protocol.lifecycle import Lifecycle
from protocol.messages import ErrorCode, Timing


class State(Enum):
    ADMITTING = auto()
    """The engine was asked for room."""
    FETCHING = auto()
    LANDING = auto()
    """Every byte is verified; the engine was asked to commit."""
    ACTIVE = auto()
    ABANDONING = auto()
    """The router has its ending; receives into our pages are still posted."""
    ENDED = auto()


# ---- events: times are seconds of the worker's monotonic clock -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """The engine has room and took the request."""

    at: float
    then: Literal["fetch", "whole", "compute"]
    """What [0, N-1) still needs: all or a part of it from P; nothing; this engine computes it, or what its cache lacks of it."""
    cached_tokens: int = 0
    """whole: N-1, the others tell later."""


@dataclass(frozen=True, slots=True)
class NotTaken:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class HandoffComplete:
    """All received, all checked. ``prefill`` is P's part of the timing; ``manifest_at`` is when it arrived."""

    at: float
    manifest_at: float
    prefill: Timing
    num_bytes: int
    cached_tokens: int
    """Those that P didn't compute."""


@dataclass(frozen=True, slots=True)
class HandoffBroken:
    """It will never be complete. Receives may still be posted."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class HandoffClosed:
    """No receive is posted any more, after a broken or abandoned hand-off."""


@dataclass(frozen=True, slots=True)
class Landed:
    at: float


@dataclass(frozen=True, slots=True)
class LandFailed:
    message: str


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """Local prefill: the first chunk runs."""

    at: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokensOut:
    at: float
    tokens: TokensEvent


@dataclass(frozen=True, slots=True)
class EngineFinished:
    finished: FinishedEvent


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine has dropped the request; its pages are back already."""

    message: str


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """By the router, or because the router that asked for this request is gone."""

    keep: bool = False
    """What is computed may stay in the cache."""


Event = (
    Taken
    | NotTaken
    | HandoffComplete
    | HandoffBroken
    | HandoffClosed
    | Landed
    | LandFailed
    | PrefillStarted
    | TokensOut
    | EngineFinished
    | EngineFailed
    | CancelAsked
)

# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellAdmitted:
    needs_prefill: bool


@dataclass(frozen=True, slots=True)
class TellRefused:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TellTokens:
    tokens: TokensEvent
    timing: Timing | None = None
    """With the first tokens, like ``cached_tokens``."""
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TellFinished:
    finished: FinishedEvent


@dataclass(frozen=True, slots=True)
class TellFailed:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TellCancelled:
    pass


@dataclass(frozen=True, slots=True)
class BeginHandoff:
    pass


@dataclass(frozen=True, slots=True)
class AbandonHandoff:
    """Drop it and answer HandoffClosed once no receive is posted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Land:
    """Commit in the engine: computed = N-1 in one assignment."""


@dataclass(frozen=True, slots=True)
class FreePages:
    """Take the request out of the engine, whatever it does there."""

    keep: bool = False


Command = (
    TellAdmitted | TellRefused | TellTokens | TellFinished | TellFailed | TellCancelled | BeginHandoff | AbandonHandoff | Land | FreePages
)


class DecodeLife(Lifecycle[State, Event, Command]):
    """Made when Admit arrives, at ``arrived_at``."""

    def __init__(self, key: RequestKey, *, arrived_at: float) -> None:
        super().__init__(f"decode {key}", State.ADMITTING)
        self._computes = False
        """[0, N-1), or what the cache lacks of it, is computed here."""
        self._cached_tokens = 0
        self._arrived_at = arrived_at
        self._timing: Timing | None = Timing()
        """Of the time before the first tokens; None once told."""
        self._mark = arrived_at
        """When the phase that is being timed began."""

    def _on_taken(self, event: Taken) -> list[Command]:
        if event.then == "fetch":
            self.state = State.FETCHING
            return [TellAdmitted(needs_prefill=True), BeginHandoff()]
        self.state = State.ACTIVE
        self._computes, self._cached_tokens, self._mark = event.then == "compute", event.cached_tokens, event.at
        return [TellAdmitted(needs_prefill=False)]

    def _on_not_taken(self, event: NotTaken) -> list[Command]:
        self.state = State.ENDED
        return [TellRefused(event.code, event.message)]

    def _on_complete(self, event: HandoffComplete) -> list[Command]:
        self.state = State.LANDING
        self._mark = event.manifest_at
        self._timing = event.prefill.model_copy(update={"transfer_bytes": event.num_bytes})
        self._cached_tokens = event.cached_tokens
        return [Land()]

    def _on_landed(self, event: Landed) -> list[Command]:
        assert self._timing is not None
        self.state = State.ACTIVE
        self._timing = self._timing.model_copy(update={"transfer_s": self._timing.transfer_s + event.at - self._mark})
        self._mark = event.at
        return []

    def _on_land_failed(self, event: LandFailed) -> list[Command]:
        self.state = State.ENDED
        return [TellFailed("internal", event.message), FreePages()]

    def _on_broken(self, event: HandoffBroken) -> list[Command]:
        self.state = State.ABANDONING
        return [TellFailed(event.code, event.message)]

    def _on_closed(self, event: HandoffClosed) -> list[Command]:
        self.state = State.ENDED
        return [FreePages()]

    def _on_prefill_started(self, event: PrefillStarted) -> list[Command]:
        if self._timing is not None and self._computes:
            self._timing = Timing(queue_s=event.at - self._arrived_at)
            self._mark, self._cached_tokens = event.at, event.cached_tokens
        return []

    def _on_tokens(self, event: TokensOut) -> list[Command]:
        timing, self._timing = self._timing, None
        if timing is None:
            return [TellTokens(event.tokens)]
        waited = {"prefill_s" if self._computes else "decode_wait_s": event.at - self._mark}
        return [TellTokens(event.tokens, timing.model_copy(update=waited), self._cached_tokens)]

    def _on_finished(self, event: EngineFinished) -> list[Command]:
        self.state = State.ENDED
        return [TellFinished(event.finished)]

    def _on_engine_failed(self, event: EngineFailed) -> list[Command]:
        self.state = State.ENDED
        return [TellFailed("internal", event.message)]

    def _on_cancel(self, event: CancelAsked) -> list[Command]:
        if self.state is State.ABANDONING:
            return []
        if self.state is State.FETCHING:
            self.state = State.ABANDONING
            return [TellCancelled(), AbandonHandoff("the request was cancelled")]
        self.state = State.ENDED
        return [TellCancelled(), FreePages(keep=event.keep)]

    HANDLERS: ClassVar = {
        Taken: _on_taken,
        NotTaken: _on_not_taken,
        HandoffComplete: _on_complete,
        HandoffBroken: _on_broken,
        HandoffClosed: _on_closed,
        Landed: _on_landed,
        LandFailed: _on_land_failed,
        PrefillStarted: _on_prefill_started,
        TokensOut: _on_tokens,
        EngineFinished: _on_finished,
        EngineFailed: _on_engine_failed,
        CancelAsked: _on_cancel,
    }
    MOVES: ClassVar = {
        State.ADMITTING: {
            Taken: {State.FETCHING, State.ACTIVE},
            NotTaken: {State.ENDED},
            CancelAsked: {State.ENDED},
        },
        State.FETCHING: {
            HandoffComplete: {State.LANDING},
            HandoffBroken: {State.ABANDONING},
            CancelAsked: {State.ABANDONING},
        },
        State.LANDING: {
            Landed: {State.ACTIVE},
            LandFailed: {State.ENDED},
            CancelAsked: {State.ENDED},
        },
        State.ACTIVE: {
            PrefillStarted: {State.ACTIVE},  # more than once after a preemption
            TokensOut: {State.ACTIVE},
            EngineFinished: {State.ENDED},
            EngineFailed: {State.ENDED},
            CancelAsked: {State.ENDED},
        },
        State.ABANDONING: {
            HandoffClosed: {State.ENDED},
            CancelAsked: {State.ABANDONING},
        },
        State.ENDED: {},
    }
