"""What can happen to a request in the router, and what its life asks the shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.ids import Epoch
from protocol.messages import (
    Admitted,
    Cancelled,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    PrefillDone,
    PrefillPlace,
    Refused,
    Tokens,
)
from router.timings import Timings

FailCode = ErrorCode | Literal["queue_full", "no_capacity", "deadline", "stopping"]


# ---- events: the workers' own messages, and these --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    decode: Epoch
    prefill: PrefillPlace | None


@dataclass(frozen=True, slots=True)
class Undelivered:
    """D's connection was gone already when it was to be asked: it has heard nothing, so nothing was begun."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WorkerLost:
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    pass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string is in the text, which only the router sees."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The router itself ends it: no room, no worker, shutdown, or a worker that broke the protocol."""

    code: FailCode
    message: str


Event = (
    Placed
    | Admitted
    | Refused
    | Tokens
    | Finished
    | Failed
    | Cancelled
    | PrefillDone
    | Undelivered
    | WorkerLost
    | ClientGone
    | DeadlinePassed
    | StopMatched
    | GivenUp
)

# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendAdmit:
    to: Epoch
    prefill: PrefillPlace | None


@dataclass(frozen=True, slots=True)
class SendPrefill:
    to: Epoch
    decode: Epoch


@dataclass(frozen=True, slots=True)
class SparePrefill:
    """P isn't needed for this placement: D has the prompt, or computes what it lacks. P was asked for nothing."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SendCancel:
    to: Epoch
    keep: bool = False
    """The answer is whole: D may keep what it has computed."""


@dataclass(frozen=True, slots=True)
class Unpair:
    """P doesn't know D (any more), whatever D reported before."""

    decode: Epoch
    prefill: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """``declined`` has no room, takes nothing new, wasn't reached, or doesn't know its partner; place it elsewhere or let it wait."""

    declined: Epoch
    why: Literal["busy", "draining", "unreachable", "unpaired"]


@dataclass(frozen=True, slots=True)
class Deliver:
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Ending:
    kind: Literal["finished", "failed", "cancelled"]
    reason: FinishReason | None = None
    """finished only."""
    code: FailCode | None = None
    """failed only."""
    message: str = ""
    finished: Finished | None = None
    """D's own account, if it was D that finished."""
    timings: Timings | None = None
    """finished only; the shell knows the time."""


@dataclass(frozen=True, slots=True)
class End:
    ending: Ending


Command = SendAdmit | SendPrefill | SparePrefill | SendCancel | Unpair | Requeue | Deliver | End
