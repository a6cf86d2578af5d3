"""D's side of one hand-off, without I/O: what to ask for, when all of it is there and right, and how it ends otherwise.

ASKED     Fetch is out; blocks that P calls ready are pulled while P computes on
SEALED    the manifest is in and fits; the rest is being pulled
VERIFYING every copy ended well; checksums are being compared
ENDING    given up; waits until no transfer touches the pages
ENDED     over, one way or the other

All or nothing: Commit comes once, after every needed byte has arrived and matched, or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from protocol.errors import PeerLost, TransferError
from protocol.ids import Epoch, RequestKey
from protocol.lifecycle import Lifecycle, leading_to
from protocol.messages import Copy, ErrorCode, Fetch, Fingerprint, HandoffFailed, Manifest, Pull, Ready, Release
from transfer.commands import CancelReceives, Commit, Ended, Fail, PostReceives, Say, Verify
from transfer.fingerprint import first_difference
from transfer.plan import PlannedCopy, blocks_for, cut, plan_pages

Command = Say | Ended | PostReceives | CancelReceives | Verify | Commit | Fail
TAGS_PER_HANDOFF = 1 << 24
COPY_BYTES = 4 << 20
"""Longest copy of a Pull. Transports cut it into messages."""
FIRST_PULL_BYTES, PULL_BYTES = 2 << 20, 16 << 20
"""Pulls are cut so that P sends the first while D still posts receives for the next. They end with the copy that fills them."""


class ReceiveState(Enum):
    NEW = auto()
    ASKED = auto()
    SEALED = auto()
    VERIFYING = auto()
    ENDING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Begin:
    """The pages are reserved."""


@dataclass(frozen=True, slots=True)
class FromPrefill:
    """P said something about this request."""

    message: Ready | Manifest | HandoffFailed


@dataclass(frozen=True, slots=True)
class CopiesEnded:
    """A batch of receives is over and won't write any more. ``error`` None: all of its bytes arrived."""

    batch: int
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """Checksums as they are in D's pages, in the order of Verify."""

    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The router or the client doesn't want it any more."""

    reason: str = "cancelled"


@dataclass(frozen=True, slots=True)
class PeerGone:
    """P is lost, by whichever channel it was noticed."""

    reason: str


_REMOTE = frozenset({FromPrefill, CopiesEnded, Cancelled, PeerGone})
_OVER = frozenset({ReceiveState.ENDING, ReceiveState.ENDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What D knows before it asks. ``blocks`` cover [0, position), in order; the first ``have_blocks`` of them hold their bytes already."""

    key: RequestKey
    epoch: Epoch
    """D's own."""
    peer: Epoch
    """P's: messages from another life of P are stale."""
    fingerprint: Fingerprint
    """D's own; P's manifest must carry the same."""
    blocks: tuple[int, ...]
    slot: int
    position: int
    token_digest: str
    have_blocks: int = 0
    checksums: bool = True
    max_bytes: int
    """Longest message of the transport."""
    first_tag: int
    """TAGS_PER_HANDOFF tags from here are this hand-off's alone, on D's transport, for ever."""

    def __post_init__(self) -> None:
        assert self.position >= 1
        assert len(self.blocks) == blocks_for(self.position, self.fingerprint.block_tokens), (len(self.blocks), self.position)
        assert 0 <= self.have_blocks <= len(self.blocks)


class HandoffReceiver(Lifecycle[ReceiveState, object, Any]):
    """One per attempt. Feed it everything that happens; do what it returns, in order.

    After Ended it may be dropped; kept, it ignores latecomers.
    """

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(f"receive {reservation.key}", ReceiveState.NEW)
        self.reservation = reservation
        self.stale = 0
        """Messages and completions that were not about this attempt any more."""
        self._sources: dict[int, int] = {}  # block index in the request -> P's block id, as far as pulled
        self.num_bytes = 0
        """Bytes asked for so far."""
        self.in_flight: set[int] = set()
        """Batches that may still write."""
        self._next_tag = reservation.first_tag
        self._manifest: Manifest | None = None
        self._reason = ""

    # ---- events --------------------------------------------------------------------------------------------------

    def _on_begin(self, event: Begin) -> list[Command]:
        self.state = ReceiveState.ASKED
        return [Say(Fetch(**self._ours(), have_blocks=self.reservation.have_blocks))]

    def _on_from_prefill(self, event: FromPrefill) -> list[Command]:
        message = event.message
        if message.key != self.reservation.key or message.epoch != self.reservation.peer:
            self.stale += 1
            return []
        if self.state in (ReceiveState.ENDING, ReceiveState.ENDED):
            self.stale += 1
            return []
        if isinstance(message, HandoffFailed):
            return self._give_up(message.code, message.message)
        if self.state is not ReceiveState.ASKED:
            return self._give_up("transfer_failed", f"{message.type} after the manifest")
        return self._ready(message) if isinstance(message, Ready) else self._sealed(message)

    def _on_copies_ended(self, event: CopiesEnded) -> list[Command]:
        if event.batch not in self.in_flight:
            self.stale += 1
            return []
        self.in_flight.remove(event.batch)
        if self.state is ReceiveState.ENDING:
            return self._end_if_quiet()
        if event.error is not None:
            return self._give_up("prefill_lost" if isinstance(event.error, PeerLost) else "transfer_failed", str(event.error))
        return self._verify_if_complete()

    def _on_verified(self, event: Verified) -> list[Command]:
        if self.state is not ReceiveState.VERIFYING:
            self.stale += 1
            return []
        manifest = self._known_manifest()
        have = self.reservation.have_blocks
        pairs = zip(event.blocks, manifest.block_checksums[have:], strict=True)
        wrong = [index for index, (ours, theirs) in enumerate(pairs, have) if ours != theirs]
        if event.slot != manifest.slot_checksum:
            return self._give_up("transfer_failed", "checksum of the slot differs")
        if wrong:
            return self._give_up("transfer_failed", f"checksum of block {wrong[0]} of the request differs ({len(wrong)} in all)")
        return self._commit()

    def _on_cancelled(self, event: Cancelled) -> list[Command]:
        if self.state in (ReceiveState.ENDING, ReceiveState.ENDED):
            return []
        return self._end(event.reason)

    def _on_peer_gone(self, event: PeerGone) -> list[Command]:
        if self.state in (ReceiveState.ENDING, ReceiveState.ENDED):
            return []
        return self._give_up("prefill_lost", event.reason)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _ready(self, message: Ready) -> list[Command]:
        if message.first_block < 0 or message.first_block + len(message.blocks) > len(self.reservation.blocks):
            return self._give_up("transfer_failed", f"{len(message.blocks)} blocks from {message.first_block} don't belong to the request")
        return self._pull(dict(enumerate(message.blocks, message.first_block)))

    def _sealed(self, manifest: Manifest) -> list[Command]:
        problem = self._mismatch(manifest)
        if problem is not None:
            return self._give_up(*problem)
        self._manifest = manifest
        self.state = ReceiveState.SEALED
        commands = self._pull(dict(enumerate(manifest.blocks)), slot=manifest.slot)
        return commands or self._verify_if_complete()

    def _mismatch(self, manifest: Manifest) -> tuple[ErrorCode, str] | None:
        ours = self.reservation
        difference = first_difference(ours.fingerprint, manifest.fingerprint)
        if difference is not None:
            return "mismatch", str(difference)
        if manifest.position != ours.position:
            return "mismatch", f"the manifest is for position {manifest.position}, not {ours.position}"
        if manifest.token_digest != ours.token_digest:
            return "mismatch", "the manifest is for other tokens"
        if len(manifest.blocks) != len(ours.blocks):
            return "mismatch", f"the manifest has {len(manifest.blocks)} blocks, not {len(ours.blocks)}"
        if ours.checksums and (len(manifest.block_checksums) != len(manifest.blocks) or manifest.slot_checksum is None):
            return "mismatch", "checksums are on here, and the manifest has none"
        return None

    def _pull(self, sources: dict[int, int], slot: int | None = None) -> list[Command]:
        """Post and ask for those of ``sources`` that aren't here yet. One block told with two ids is the end of it."""
        for index, block in sources.items():
            known = self._sources.get(index, block)
            if known != block:
                return self._give_up("transfer_failed", f"block {index} of the request was at {known} and is now at {block}")
        lacking = [index for index in sources if index >= self.reservation.have_blocks and index not in self._sources]
        self._sources |= {index: sources[index] for index in lacking}
        try:
            planned = self._plan([sources[index] for index in lacking], [self.reservation.blocks[index] for index in lacking], slot)
        except ValueError as error:
            return self._give_up("transfer_failed", str(error))
        return [command for part in _pulls(planned) for command in self._ask(part)]

    def _ask(self, planned: Sequence[PlannedCopy]) -> list[Command]:
        """Receives first: P may answer at once."""
        batch = self._next_tag
        self.in_flight.add(batch)
        tagged = tuple((copy, self._take_tags(copy)) for copy in planned)
        copies = tuple(Copy(region=copy.region, offset=copy.source_offset, num_bytes=copy.num_bytes, tag=tag) for copy, tag in tagged)
        return [PostReceives(batch, tagged), Say(Pull(**self._ours(), copies=copies))]

    def _plan(self, source: Sequence[int], target: Sequence[int], slot: int | None) -> list[PlannedCopy]:
        ours = self.reservation
        planned = plan_pages("blocks", ours.fingerprint.block_bytes, source, target, COPY_BYTES)
        if slot is not None:
            planned += plan_pages("slots", ours.fingerprint.slot_bytes, [slot], [ours.slot], COPY_BYTES)
        return planned

    def _take_tags(self, copy: PlannedCopy) -> int:
        tag = self._next_tag
        self._next_tag += len(cut(copy.num_bytes, self.reservation.max_bytes))
        assert self._next_tag <= self.reservation.first_tag + TAGS_PER_HANDOFF
        self.num_bytes += copy.num_bytes
        return tag

    def _verify_if_complete(self) -> list[Command]:
        if self.state is not ReceiveState.SEALED or self.in_flight:
            return []
        if not self.reservation.checksums:
            return self._commit()
        self.state = ReceiveState.VERIFYING
        return [Verify(self.reservation.blocks[self.reservation.have_blocks :], self.reservation.slot)]

    def _commit(self) -> list[Command]:
        self.state = ReceiveState.ENDED
        return [Commit(), Say(Release(**self._ours(), ok=True)), Ended(ok=True)]

    def _give_up(self, code: ErrorCode, reason: str) -> list[Command]:
        return [Fail(code, reason), *self._end(reason)]

    def _end(self, reason: str) -> list[Command]:
        """The Release goes out even to a lost peer: one channel may be gone and the other not."""
        self.state = ReceiveState.ENDING
        self._reason = reason
        commands: list[Command] = [Say(Release(**self._ours(), ok=False, reason=reason))]
        if self.in_flight:
            commands.append(CancelReceives(tuple(sorted(self.in_flight))))
        return commands + self._end_if_quiet()

    def _end_if_quiet(self) -> list[Command]:
        if self.in_flight:
            return []
        self.state = ReceiveState.ENDED
        return [Ended(ok=False, reason=self._reason)]

    def _known_manifest(self) -> Manifest:
        assert self._manifest is not None
        return self._manifest

    def _ours(self) -> dict[str, object]:
        key = self.reservation.key
        return {"epoch": self.reservation.epoch, "request_id": key.request_id, "generation": key.generation}

    HANDLERS: ClassVar = {
        Begin: _on_begin,
        FromPrefill: _on_from_prefill,
        CopiesEnded: _on_copies_ended,
        Verified: _on_verified,
        Cancelled: _on_cancelled,
        PeerGone: _on_peer_gone,
    }
    MOVES: ClassVar = {
        ReceiveState.NEW: {Begin: {ReceiveState.ASKED}},
        ReceiveState.ASKED: leading_to(ReceiveState.ASKED, ReceiveState.SEALED, ReceiveState.VERIFYING, *_OVER, events=_REMOTE),
        ReceiveState.SEALED: leading_to(ReceiveState.SEALED, ReceiveState.VERIFYING, *_OVER, events=_REMOTE),
        ReceiveState.VERIFYING: leading_to(ReceiveState.VERIFYING, *_OVER, events=_REMOTE | {Verified}),
        ReceiveState.ENDING: leading_to(*_OVER, events=_REMOTE | {Verified}),
        ReceiveState.ENDED: leading_to(ReceiveState.ENDED, events=_REMOTE | {Verified}),
    }


def _pulls(planned: Sequence[PlannedCopy]) -> list[list[PlannedCopy]]:
    pulls: list[list[PlannedCopy]] = []
    room = 0
    for copy in planned:
        if room <= 0:
            room = PULL_BYTES if pulls else FIRST_PULL_BYTES
            pulls.append([])
        pulls[-1].append(copy)
        room -= copy.num_bytes
    return pulls
