"""What the hand-off lifecycles ask for. ``session`` does the transport's part of it, the worker does the rest."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Copy, DecodeToPrefill, ErrorCode, PrefillToDecode
from transfer.plan import PlannedCopy


@dataclass(frozen=True, slots=True)
class Say:
    """Send this message to the peer. A peer that can't be reached is reported lost by its link; nothing is retried."""

    message: DecodeToPrefill | PrefillToDecode


@dataclass(frozen=True, slots=True)
class Ended:
    """The last command of every hand-off, exactly once at each end: no transfer touches its pages any more.

    D: the pages are the engine's (``ok``) or may be freed. P: free them.
    """

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PostReceives:
    """D, for the session: receive these copies, each under its own tag and those after it. ``batch`` comes back in CopiesEnded."""

    batch: int
    copies: tuple[tuple[PlannedCopy, int], ...]


@dataclass(frozen=True, slots=True)
class CancelReceives:
    """D, for the session. Each of these batches still ends with a CopiesEnded."""

    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """D, for the session: answer with Verified. The pages that were pulled, in the order of the request."""

    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Commit:
    """D: every byte is in place and verified; make the request computed = N-1 (``core.land``)."""


@dataclass(frozen=True, slots=True)
class Fail:
    """D: the hand-off can't succeed. Tell the router now; the pages stay reserved until Ended."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class PostSends:
    """P, for the session: send these pieces of the own regions, each under its own tag and those after it."""

    batch: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """P: submit the request to the engine (origin "seal")."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """P: don't compute; tell the router."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class GrantLease:
    """P: start the lease or make it longer, by ``seconds`` from now."""

    seconds: float


@dataclass(frozen=True, slots=True)
class EndLease:
    """P: the lease isn't needed any more."""
