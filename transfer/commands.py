"""What the hand-off lifecycles ask for. ``session`` does the transport's part of it, the worker does the rest."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import DecodeToPrefill, ErrorCode, PrefillToDecode
from protocol.regions import RegionName


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
class PostReceive:
    """D, for the session: receive into this piece of the own region."""

    region: RegionName
    offset: int
    num_bytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class CancelReceives:
    """D, for the session. Each of them still ends with a CopyEnded."""

    tags: tuple[int, ...]


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
class PostSend:
    """P, for the session: send this piece of the own region."""

    region: RegionName
    offset: int
    num_bytes: int
    tag: int


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
