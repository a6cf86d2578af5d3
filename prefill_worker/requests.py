"""All requests of a prefill worker: takes what the router, the decode workers and the engine say to the right machines, and does
what those command. No request waits for another here, and nothing blocks.

Each attempt has a hand-off session with D (made by whichever comes first, Prefill or Fetch) and, once the router asked, a life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from engine.bridge import EngineBridge
from engine.request import EngineEvent, EngineRequest, FailedEvent, ReadyEvent, SealedEvent, StartedEvent
from prefill_worker import lifecycle as life
from prefill_worker.peers import DecodePeer, HandoffMessage
from protocol.errors import EngineStopped
from protocol.ids import Epoch, RequestKey
from protocol.messages import (
    Cancelled,
    ErrorCode,
    Failed,
    Fingerprint,
    Message,
    Prefill,
    PrefillDone,
    Refused,
    RequestMessage,
    Timing,
)
from transfer import send
from transfer.checksums import page_checksums, token_digest
from transfer.commands import Compute, Ended, EndLease, GrantLease, Refuse, Say
from transfer.layout import Layout
from transfer.lease import Leases
from transfer.session import SendCommand, SendSession

log = logging.getLogger("baton.prefill")

COUNTERS = (
    "baton_handoffs_served_total",
    "baton_handoffs_not_served_total",
    "baton_handoff_sent_bytes_total",
    "baton_leases_ended_total",
)


@dataclass(slots=True)
class Attempt:
    """One attempt of one request on this worker."""

    session: SendSession
    prefill: Prefill | None = None
    life: life.PrefillLife | None = None
    checksums: list[asyncio.Task[tuple[int, ...]]] = field(default_factory=list)
    """Of the request's blocks in order, computed in threads as they become ready."""
    num_hashed: int = 0
    ended_at: float | None = None
    """When the hand-off was over: the attempt is only remembered from then on, to answer latecomers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """How to reach everybody else."""

    tell_router: Callable[[Message], None]
    tell_peer: Callable[[Epoch, Message], None]
    is_paired: Callable[[Epoch], bool]
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    """A task whose failure is the worker's."""


class PrefillRequests:
    def __init__(
        self, bridge: EngineBridge, layout: Layout, doors: Doors, *, epoch: Epoch, fingerprint: Fingerprint, lease_s: float, checksums: bool
    ) -> None:
        self._bridge, self._layout, self._doors = bridge, layout, doors
        self._epoch, self._fingerprint = epoch, fingerprint
        self._lease_s, self._checksums = lease_s, checksums
        self._attempts: dict[RequestKey, Attempt] = {}
        self._leases = Leases()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def num_open(self) -> int:
        """Attempts whose pages or peers still wait for something."""
        return sum(1 for attempt in self._attempts.values() if attempt.ended_at is None)

    # ---- the router ----------------------------------------------------------------------------------------------

    def on_prefill(self, message: Prefill) -> None:
        attempt = self._attempt(message.key)
        if attempt.prefill is not None:
            log.warning("%s: the router asked twice", message.key)
            return
        attempt.prefill = message
        # Also when this worker is leaving: the router sends nothing new then, only what it has promised to a decode worker already.
        if self._doors.is_paired(message.decode_epoch):
            attempt.session.feed(send.PrefillAsked(message.decode_epoch))
        else:
            self._turn_away(message.key, attempt, "decode_lost", f"decode worker {message.decode_epoch} isn't paired with this worker")

    def _turn_away(self, key: RequestKey, attempt: Attempt, code: ErrorCode, reason: str) -> None:
        self._refuse(key, code, reason)
        attempt.session.feed(send.GaveUp(code, reason))

    def on_cancel(self, key: RequestKey) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.ended_at is None:
            self._cancel(key, attempt)

    def cancel_all(self) -> None:
        """Nobody wants these results any more, or the drain took too long."""
        for key, attempt in list(self._attempts.items()):
            if attempt.ended_at is None:
                self._cancel(key, attempt)

    def _cancel(self, key: RequestKey, attempt: Attempt) -> None:
        if attempt.life is not None and attempt.life.state is not life.State.ENDED:
            self._live(key, life.CancelAsked())
        else:
            attempt.session.feed(send.GaveUp("internal", "the request was cancelled"))

    # ---- decode workers ------------------------------------------------------------------------------------------

    def on_peer_message(self, peer: DecodePeer, message: HandoffMessage) -> None:
        attempt = self._attempt(message.key)
        if attempt.session.machine.decode_epoch in (None, peer.epoch):
            attempt.session.connection = peer.connection
        attempt.session.feed(send.FromDecode(message))

    def on_peer_lost(self, epoch: Epoch, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.session.machine.decode_epoch == epoch and attempt.ended_at is None:
                attempt.session.feed(send.PeerGone(f"the decode worker is gone: {reason}"))

    # ---- the engine ----------------------------------------------------------------------------------------------

    def on_engine_events(self, events: list[EngineEvent]) -> None:
        now = time.monotonic()
        for event in events:
            match event:
                case StartedEvent():
                    self._live(event.key, life.Started(now))
                case ReadyEvent():
                    self._live(event.key, life.BlocksReady(event))
                case SealedEvent():
                    self._live(event.key, life.Sealed(now, event))
                case FailedEvent():
                    self._live(event.key, life.EngineFailed(event.message))
                case _:
                    raise AssertionError(f"a prefill worker's engine said {event}")

    def _on_submitted(self, key: RequestKey, submitted: Future[None]) -> None:
        error = submitted.exception()
        if isinstance(error, ValueError):
            self._live(key, life.NotTaken("bad_request", str(error)))
        elif error is not None:
            self._live(key, life.NotTaken("internal", str(error)))
        else:
            self._live(key, life.Taken())

    # ---- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End leases; forget attempts that ended a lease ago."""
        for key in self._leases.take_ended(now):
            self.counts["baton_leases_ended_total"] += 1
            self._attempts[key].session.feed(send.LeaseOver())
        for key, attempt in list(self._attempts.items()):
            if attempt.ended_at is not None and now - attempt.ended_at > self._lease_s:
                del self._attempts[key]

    # ---- what the machines command -------------------------------------------------------------------------------

    def _attempt(self, key: RequestKey) -> Attempt:
        if key not in self._attempts:
            machine = send.HandoffSender(key, self._epoch, self._fingerprint, self._lease_s)
            self._attempts[key] = Attempt(SendSession(machine, self._layout, lambda command: self._on_handoff(key, command)))
        return self._attempts[key]

    def _on_handoff(self, key: RequestKey, command: SendCommand) -> None:
        attempt = self._attempts[key]
        match command:
            case Say(message=message):
                peer = attempt.session.machine.decode_epoch
                assert peer is not None, "said before anybody asked"
                self._doors.tell_peer(peer, message)
            case Compute():
                self._compute(key, attempt)
            case Refuse(code=code, message=text):
                self._refuse(key, code, text)
            case GrantLease(seconds=seconds):
                self._leases.grant(key, time.monotonic(), seconds)
            case EndLease():
                self._leases.end(key)
            case Ended():
                self._on_handoff_ended(key, attempt, command)

    def _compute(self, key: RequestKey, attempt: Attempt) -> None:
        assert attempt.prefill is not None
        attempt.life = life.PrefillLife(key, time.monotonic())
        cache = attempt.prefill.cache
        request = EngineRequest(key=key, token_ids=attempt.prefill.token_ids, origin="seal", cache_salt=cache.salt, use_cache=cache.enabled)
        self._bridge.ask(lambda core: core.submit(request), lambda submitted: self._on_submitted(key, submitted))

    def _on_handoff_ended(self, key: RequestKey, attempt: Attempt, ended: Ended) -> None:
        attempt.ended_at = time.monotonic()
        self.counts["baton_handoffs_served_total" if ended.ok else "baton_handoffs_not_served_total"] += 1
        self.counts["baton_handoff_sent_bytes_total"] += attempt.session.machine.num_bytes
        self._leases.end(key)
        if attempt.life is not None:
            self._live(key, life.HandoffOver(ended.ok, ended.reason))

    def _live(self, key: RequestKey, event: life.Event) -> None:
        """Feed the request's life, and do what it commands. A life that has ended hears no more: its engine events may still be on
        their way."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.life is None or attempt.life.state is life.State.ENDED:
            return
        for command in attempt.life.handle(event):
            self._do(key, attempt, command)

    def _do(self, key: RequestKey, attempt: Attempt, command: life.Command) -> None:
        match command:
            case life.OfferBlocks(ready=ready):
                self._hash(attempt, ready.blocks)
                attempt.session.feed(send.BlocksReady(ready.first_block, ready.blocks))
            case life.OfferSeal(sealed=sealed, timing=timing):
                self._doors.spawn(self._seal(attempt, sealed, timing))
            case life.CloseHandoff(code=code, message=text):
                attempt.session.feed(send.GaveUp(code, text))
            case life.FreePages():
                self._bridge.ask(lambda core: core.cancel(key), _raise_failure)
            case life.TellDone(timing=timing):
                self._tell(PrefillDone, key, timing=timing)
            case life.TellRefused(code=code, message=text):
                self._refuse(key, code, text)
            case life.TellFailed(code=code, message=text):
                self._tell(Failed, key, code=code, message=text)
            case life.TellCancelled():
                self._tell(Cancelled, key)

    def _tell(self, kind: type[RequestMessage], key: RequestKey, **values: object) -> None:
        self._doors.tell_router(kind(epoch=self._epoch, request_id=key.request_id, generation=key.generation, **values))

    def _refuse(self, key: RequestKey, code: str, message: str) -> None:
        self._tell(Refused, key, code=code, message=message)

    # ---- sealing -------------------------------------------------------------------------------------------------

    def _hash(self, attempt: Attempt, blocks: tuple[int, ...]) -> None:
        if self._checksums and blocks:
            attempt.checksums.append(self._doors.spawn(asyncio.to_thread(page_checksums, self._layout, "blocks", blocks)))
            attempt.num_hashed += len(blocks)

    async def _seal(self, attempt: Attempt, sealed: SealedEvent, timing: Timing) -> None:
        """Checksum what isn't yet, then let the hand-off have it. Only Ended gives the pages back, whatever happens meanwhile."""
        assert attempt.prefill is not None
        sealed_at = time.monotonic()
        self._hash(attempt, sealed.blocks[attempt.num_hashed :])
        slot_checksum = None
        if self._checksums:
            (slot_checksum,) = await asyncio.to_thread(page_checksums, self._layout, "slots", (sealed.slot,))
        checksums = [await task for task in attempt.checksums]
        attempt.session.feed(
            send.Sealed(
                position=sealed.position,
                token_digest=token_digest(attempt.prefill.token_ids),
                blocks=sealed.blocks,
                slot=sealed.slot,
                block_checksums=tuple(chain.from_iterable(checksums)),
                slot_checksum=slot_checksum,
                timing=timing.model_copy(update={"transfer_s": time.monotonic() - sealed_at}),
                cached_tokens=sealed.cached_tokens,
            )
        )


def _raise_failure(future: Future[bool]) -> None:
    """An engine that can't even cancel is gone, and the worker with it (the bridge says why)."""
    error = future.exception()
    if error is not None and not isinstance(error, EngineStopped):
        raise error
