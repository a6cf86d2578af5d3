"""P's side of one hand-off, without I/O. D's Fetch and the router's Prefill may come in either order.

ASKED     D asked, the router's Prefill isn't here yet
COMPUTING the engine works on it; ready blocks are given as soon as D has asked
SEALED    all is computed and pinned under a lease
ENDING    over, but sends still read the pages
ENDED     the pages are free

Only pages that are ready and belong to this request are ever sent, whatever D asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from protocol.errors import TransferError
from protocol.ids import Epoch, RequestKey
from protocol.lifecycle import Lifecycle, leading_to
from protocol.messages import Copy, ErrorCode, Fetch, Fingerprint, HandoffFailed, Manifest, Pull, Ready, Release, Timing
from transfer.commands import Compute, Ended, EndLease, GrantLease, PostSends, Refuse, Say

Command = Say | Ended | PostSends | Compute | Refuse | GrantLease | EndLease


class SendState(Enum):
    NEW = auto()
    ASKED = auto()
    COMPUTING = auto()
    SEALED = auto()
    ENDING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class PrefillAsked:
    """The router wants it computed for this D. Answered by Compute or Refuse."""

    decode_epoch: Epoch


@dataclass(frozen=True, slots=True)
class FromDecode:
    """D said something about this request."""

    message: Fetch | Pull | Release


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """Blocks [first_block, first_block + len(blocks)) of the request are final (the engine's ReadyEvent)."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """All is computed (the engine's SealedEvent), with what the manifest says beside it. Checksums empty and None when they are off."""

    position: int
    token_digest: str
    blocks: tuple[int, ...]
    slot: int
    block_checksums: tuple[int, ...]
    slot_checksum: int | None
    timing: Timing
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CopiesEnded:
    """A batch of sends doesn't read its pages any more."""

    batch: int
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The router cancelled, or the engine can't."""

    code: ErrorCode
    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """D is lost, by whichever channel it was noticed."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The lease ran out by P's clock."""


_REMOTE = frozenset({FromDecode, CopiesEnded, GaveUp, PeerGone, PrefillAsked})
_OVER = frozenset({SendState.ENDING, SendState.ENDED})
_ENGINE = frozenset({BlocksReady, Sealed})


class HandoffSender(Lifecycle[SendState, object, Any]):
    """One per attempt. Feed it everything that happens; do what it returns, in order.

    After Ended keep it for about a lease: it answers a Prefill that comes after D has already given up.
    """

    def __init__(self, key: RequestKey, epoch: Epoch, fingerprint: Fingerprint, lease_s: float) -> None:
        """``epoch`` and ``fingerprint`` are P's own."""
        super().__init__(f"send {key}", SendState.NEW)
        self.key, self.epoch, self.fingerprint, self.lease_s = key, epoch, fingerprint, lease_s
        self.stale = 0
        self.num_bytes = 0
        """Bytes given to the transport."""
        self._decode: Epoch | None = None
        self._asked = False
        self._leased = False
        self._blocks: dict[int, int] = {}  # block index in the request -> own block id, final ones only
        self._ready: set[int] = set()  # the ids among them
        self._sealed: Sealed | None = None
        self.in_flight: set[int] = set()
        """Batches of sends that still read pages."""
        self._ok, self._reason = False, ""
        self._code: ErrorCode | None = None

    @property
    def decode_epoch(self) -> Epoch | None:
        """For whom: as the router said, or, before it did, who asked."""
        return self._decode

    # ---- events --------------------------------------------------------------------------------------------------

    def _on_prefill_asked(self, event: PrefillAsked) -> list[Command]:
        if self.state in (SendState.ENDING, SendState.ENDED):
            return [Refuse("transfer_failed", f"the hand-off is over already: {self._reason}")]
        if self.state in (SendState.COMPUTING, SendState.SEALED):
            self.stale += 1
            return []
        if self._asked and self._decode != event.decode_epoch:
            return [
                Refuse("transfer_failed", "another decode worker asked for it"),
                *self._end("asked by the wrong decode worker", "mismatch"),
            ]
        self._decode = event.decode_epoch
        self.state = SendState.COMPUTING
        return [*self._without_lease(), Compute()]

    def _on_from_decode(self, event: FromDecode) -> list[Command]:
        message = event.message
        known = self._decode is None or message.epoch == self._decode
        if message.key != self.key or not known:
            self.stale += 1
            return []
        if self.state in (SendState.ENDING, SendState.ENDED):
            return self._too_late(message)
        if isinstance(message, Fetch):
            return self._fetch(message)
        if isinstance(message, Pull):
            return self._pull(message)
        return self._released(message)

    def _on_blocks_ready(self, event: BlocksReady) -> list[Command]:
        if self.state is not SendState.COMPUTING:
            return []
        self._learn(event.first_block, event.blocks)
        return [Say(Ready(**self._ours(), first_block=event.first_block, blocks=event.blocks))] if self._asked else []

    def _on_sealed(self, event: Sealed) -> list[Command]:
        if self.state is not SendState.COMPUTING:
            return []
        self._learn(0, event.blocks)
        self._sealed = event
        self.state = SendState.SEALED
        return [*self._lease(), *([self._manifest()] if self._asked else [])]

    def _on_copies_ended(self, event: CopiesEnded) -> list[Command]:
        if event.batch not in self.in_flight:
            self.stale += 1
            return []
        self.in_flight.remove(event.batch)
        if self.state is SendState.ENDING:
            return self._end_if_quiet()
        return [] if event.error is None else self._end(str(event.error), "transfer_failed")

    def _on_gave_up(self, event: GaveUp) -> list[Command]:
        return self._end(event.reason, event.code)

    def _on_peer_gone(self, event: PeerGone) -> list[Command]:
        return self._end(event.reason, None)

    def _on_lease_over(self, event: LeaseOver) -> list[Command]:
        self._leased = False
        return self._end(f"not fetched within {self.lease_s:g} s", "lease_ended")

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _too_late(self, message: Fetch | Pull | Release) -> list[Command]:
        """D asks for the first time when all is over already: it must hear that, or it would wait for ever."""
        if self._asked or not isinstance(message, Fetch):
            self.stale += 1
            return []
        self._asked, self._decode = True, message.epoch
        return [Say(HandoffFailed(**self._ours(), code=self._code or "transfer_failed", message=self._reason))]

    def _fetch(self, message: Fetch) -> list[Command]:
        if self._asked:
            self.stale += 1
            return []
        self._asked, self._decode = True, message.epoch
        if self.state is SendState.NEW:
            self.state = SendState.ASKED
            return self._lease()
        if self.state is SendState.SEALED:
            return [*self._lease(), self._manifest()]
        if not self._blocks:
            return []
        return [Say(Ready(**self._ours(), first_block=0, blocks=tuple(self._blocks[i] for i in range(len(self._blocks)))))]

    def _pull(self, message: Pull) -> list[Command]:
        problem = self._problem(message.copies)
        if problem is not None:
            return self._end(problem, "transfer_failed")
        batch = message.copies[0].tag
        self.in_flight.add(batch)
        self.num_bytes += sum(copy.num_bytes for copy in message.copies)
        return [*(self._lease() if self.state is SendState.SEALED else []), PostSends(batch, message.copies)]

    def _problem(self, copies: Sequence[Copy]) -> str | None:
        if not self._asked:
            return "pull before fetch"
        if not copies or copies[0].tag in self.in_flight:
            return "a pull of nothing, or of what is on its way"
        for copy in copies:
            if not self._lies_in_ready_pages(copy):
                return f"{copy.num_bytes} bytes at {copy.offset} of {copy.region} are not in this request's ready pages"
        return None

    def _lies_in_ready_pages(self, copy: Copy) -> bool:
        if copy.offset < 0 or copy.num_bytes < 1:
            return False
        end = copy.offset + copy.num_bytes
        if copy.region == "slots":
            size = self.fingerprint.slot_bytes
            return self._sealed is not None and self._sealed.slot * size <= copy.offset and end <= (self._sealed.slot + 1) * size
        size = self.fingerprint.block_bytes
        return all(page in self._ready for page in range(copy.offset // size, (end - 1) // size + 1))

    def _released(self, message: Release) -> list[Command]:
        if self.state is SendState.NEW:
            self._decode = message.epoch
        return self._end(message.reason, None, ok=message.ok)

    def _learn(self, first_block: int, blocks: tuple[int, ...]) -> None:
        assert first_block <= len(self._blocks), f"blocks from {first_block} are ready before those from {len(self._blocks)}"
        for index, block in enumerate(blocks, first_block):
            assert self._blocks.get(index, block) == block, f"block {index} moved from {self._blocks[index]} to {block}"
            self._blocks[index] = block
            self._ready.add(block)

    def _manifest(self) -> Say:
        sealed = self._sealed
        assert sealed is not None
        return Say(
            Manifest(
                **self._ours(),
                position=sealed.position,
                token_digest=sealed.token_digest,
                fingerprint=self.fingerprint,
                blocks=sealed.blocks,
                slot=sealed.slot,
                block_checksums=sealed.block_checksums,
                slot_checksum=sealed.slot_checksum,
                lease_s=self.lease_s,
                timing=sealed.timing,
                cached_tokens=sealed.cached_tokens,
            )
        )

    def _lease(self) -> list[Command]:
        self._leased = True
        return [GrantLease(self.lease_s)]

    def _without_lease(self) -> list[Command]:
        leased, self._leased = self._leased, False
        return [EndLease()] if leased else []

    def _end(self, reason: str, code: ErrorCode | None, *, ok: bool = False) -> list[Command]:
        """``code``: D must be told, if it asked. None: it was D who ended it, or D is gone."""
        if self.state in (SendState.ENDING, SendState.ENDED):
            return []
        told = self._asked and code is not None
        commands: list[Command] = self._without_lease()
        if told:
            commands.append(Say(HandoffFailed(**self._ours(), code=code, message=reason)))
        self._ok, self._reason, self._code = ok, reason, code
        self.state = SendState.ENDING
        return commands + self._end_if_quiet()

    def _end_if_quiet(self) -> list[Command]:
        if self.in_flight:
            return []
        self.state = SendState.ENDED
        return [Ended(ok=self._ok, reason=self._reason)]

    def _ours(self) -> dict[str, object]:
        return {"epoch": self.epoch, "request_id": self.key.request_id, "generation": self.key.generation}

    HANDLERS: ClassVar = {
        PrefillAsked: _on_prefill_asked,
        FromDecode: _on_from_decode,
        BlocksReady: _on_blocks_ready,
        Sealed: _on_sealed,
        CopiesEnded: _on_copies_ended,
        GaveUp: _on_gave_up,
        PeerGone: _on_peer_gone,
        LeaseOver: _on_lease_over,
    }
    MOVES: ClassVar = {
        SendState.NEW: leading_to(SendState.NEW, SendState.ASKED, SendState.COMPUTING, *_OVER, events=(FromDecode, PrefillAsked, GaveUp)),
        SendState.ASKED: leading_to(SendState.ASKED, SendState.COMPUTING, *_OVER, events=_REMOTE | {LeaseOver}),
        SendState.COMPUTING: leading_to(SendState.COMPUTING, SendState.SEALED, *_OVER, events=_REMOTE | _ENGINE),
        SendState.SEALED: leading_to(SendState.SEALED, *_OVER, events=_REMOTE | {LeaseOver}),
        SendState.ENDING: leading_to(*_OVER, events=_REMOTE | _ENGINE | {LeaseOver}),
        SendState.ENDED: leading_to(SendState.ENDED, events=_REMOTE | _ENGINE | {LeaseOver}),
    }
