"""All requests of a decode worker: takes what the router, the prefill workers and the engine say to the right machines, and does
what those command. No request waits for another here, and nothing blocks.

Each attempt has a life and, when [0, N-1) comes from a prefill worker, a hand-off session with it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from decode_worker import lifecycle as life
from decode_worker.admission import take
from decode_worker.peers import HandoffMessage
from engine.bridge import EngineBridge
from engine.request import EngineEvent, EngineRequest, FailedEvent, FinishedEvent, Landing, StartedEvent, TokensEvent
from protocol.errors import EngineStopped
from protocol.ids import Epoch, RequestKey
from protocol.messages import (
    Admit,
    Admitted,
    Cancel,
    Cancelled,
    Failed,
    Fingerprint,
    Finished,
    Manifest,
    Message,
    Refused,
    RequestMessage,
    Tokens,
)
from transfer import receive
from transfer.checksums import token_digest
from transfer.commands import Commit, Ended, Fail, Say
from transfer.layout import Layout
from transfer.receive import TAGS_PER_HANDOFF, HandoffReceiver, Reservation
from transfer.session import ReceiveCommand, ReceiveSession
from transfer.transport import Connection

log = logging.getLogger("baton.decode")

COUNTERS = (
    "baton_handoffs_received_total",
    "baton_handoffs_failed_total",
    "baton_handoff_received_bytes_total",
    "baton_stale_messages_total",
)


@dataclass(slots=True)
class Attempt:
    """One attempt of one request on this worker."""

    admit: Admit
    life: life.DecodeLife
    landing: Landing | None = None
    session: ReceiveSession | None = None
    manifest: Manifest | None = None
    manifest_at: float = 0.0

    @property
    def peer(self) -> Epoch | None:
        return self.admit.prefill.epoch if self.session is not None and self.admit.prefill is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """How to reach everybody else."""

    tell_router: Callable[[Message], None]
    tell_peer: Callable[[Epoch, Message], None]
    connection: Callable[[Epoch], Connection | None]
    """To a paired prefill worker."""


class DecodeRequests:
    def __init__(
        self,
        bridge: EngineBridge,
        layout: Layout,
        doors: Doors,
        *,
        epoch: Epoch,
        fingerprint: Fingerprint,
        checksums: bool,
        max_message_bytes: int,
        max_waiting: int,
    ) -> None:
        """``max_waiting``: how many requests with local prefill may wait in the engine; more are refused as busy."""
        self._bridge, self._layout, self._doors = bridge, layout, doors
        self._epoch, self._fingerprint = epoch, fingerprint
        self._checksums, self._max_message_bytes, self._max_waiting = checksums, max_message_bytes, max_waiting
        self._attempts: dict[RequestKey, Attempt] = {}
        self._tags = itertools.count(1)
        self._draining = False
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def num_open(self) -> int:
        return len(self._attempts)

    # ---- the router ----------------------------------------------------------------------------------------------

    def on_admit(self, message: Admit) -> None:
        key = message.key
        if key in self._attempts:
            log.warning("%s: the router asked twice", key)
            return
        split = message.prefill is not None and len(message.token_ids) > 1
        attempt = Attempt(message, life.DecodeLife(key, arrived_at=time.monotonic()))
        self._attempts[key] = attempt
        if self._draining:
            self._live(key, life.NotTaken("draining", "this worker is leaving"))
        elif split and not self._is_paired(message):
            self._live(key, life.NotTaken("busy", "not paired with that prefill worker (any more)"))
        else:
            self._ask_engine(message, split=split)

    def _is_paired(self, message: Admit) -> bool:
        return message.prefill is not None and self._doors.connection(message.prefill.epoch) is not None

    def _ask_engine(self, message: Admit, *, split: bool) -> None:
        request = EngineRequest(
            key=message.key,
            token_ids=message.token_ids,
            origin="remote" if split else "local",
            sampling=message.sampling,
            cache_salt=message.cache.salt,
            use_cache=message.cache.enabled,
        )
        self._bridge.ask(
            lambda core: take(core, request, local_tokens=message.local_tokens, max_waiting=self._max_waiting),
            lambda taken: self._on_taken(request.key, taken),
        )

    def on_cancel(self, message: Cancel) -> None:
        self._live(message.key, life.CancelAsked(message.keep))

    def cancel_all(self) -> None:
        """Nobody wants these results any more, or the drain took too long."""
        for key in list(self._attempts):
            self._live(key, life.CancelAsked())

    def drain(self) -> None:
        """Nothing new from now on. What is here goes on."""
        self._draining = True

    # ---- prefill workers -----------------------------------------------------------------------------------------

    def on_peer_message(self, epoch: Epoch, message: HandoffMessage) -> None:
        attempt = self._attempts.get(message.key)
        if attempt is None or attempt.peer != epoch or attempt.session is None:
            self.counts["baton_stale_messages_total"] += 1
            return
        if isinstance(message, Manifest):
            attempt.manifest, attempt.manifest_at = message, time.monotonic()
        attempt.session.feed(receive.FromPrefill(message))

    def on_peer_lost(self, epoch: Epoch, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.peer == epoch and attempt.session is not None:
                attempt.session.feed(receive.PeerGone(f"the prefill worker is gone: {reason}"))

    # ---- the engine ----------------------------------------------------------------------------------------------

    def on_engine_events(self, events: list[EngineEvent]) -> None:
        now = time.monotonic()
        for event in events:
            match event:
                case TokensEvent():
                    self._live(event.key, life.TokensOut(now, event))
                case FinishedEvent():
                    self._live(event.key, life.EngineFinished(event))
                case FailedEvent():
                    self._live(event.key, life.EngineFailed(event.message))
                case StartedEvent():
                    self._live(event.key, life.PrefillStarted(now, event.cached_tokens))
                case _:
                    raise AssertionError(f"a decode worker's engine said {event}")

    def _on_taken(self, key: RequestKey, taken: Future[Landing | Literal["queued", "full"]]) -> None:
        error = taken.exception()
        if error is not None:
            self._live(key, life.NotTaken("bad_request" if isinstance(error, ValueError) else "internal", str(error)))
            return
        now, outcome = time.monotonic(), taken.result()
        if outcome == "full":
            self._live(key, life.NotTaken("busy", "no room"))
        elif outcome == "queued":
            self._live(key, life.Taken(now, "compute"))
        elif outcome.complete:
            self._live(key, life.Taken(now, "whole", outcome.cached_tokens))
        elif key in self._attempts:
            self._attempts[key].landing = outcome
            self._live(key, life.Taken(now, "fetch"))

    def _on_landed(self, key: RequestKey, landed: Future[None]) -> None:
        error = landed.exception()
        self._live(key, life.Landed(time.monotonic()) if error is None else life.LandFailed(f"{type(error).__name__}: {error}"))

    # ---- what the machines command -------------------------------------------------------------------------------

    def _live(self, key: RequestKey, event: life.Event) -> None:
        """Feed the request's life, and do what it commands. One that has ended is not here any more: its engine events may still be on
        their way."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        for command in attempt.life.handle(event):
            self._do(key, attempt, command)
        if attempt.life.state is life.State.ENDED:
            self._attempts.pop(key, None)

    def _do(self, key: RequestKey, attempt: Attempt, command: life.Command) -> None:
        match command:
            case life.BeginHandoff():
                self._begin(key, attempt)
            case life.AbandonHandoff(reason=reason):
                assert attempt.session is not None
                attempt.session.feed(receive.Cancelled(reason))
            case life.Land():
                self._bridge.ask(lambda core: core.land(key), lambda landed: self._on_landed(key, landed))
            case life.FreePages(keep=keep):
                self._bridge.ask(lambda core: core.cancel(key, keep=keep), _raise_failure)
            case _:
                self._tell(key, command)

    def _tell(self, key: RequestKey, command: life.Command) -> None:
        match command:
            case life.TellTokens(tokens=tokens, timing=timing, cached_tokens=cached_tokens):
                self._send(
                    Tokens,
                    key,
                    index=tokens.index,
                    token_ids=tokens.token_ids,
                    logprobs=tokens.logprobs,
                    timing=timing,
                    cached_tokens=cached_tokens,
                )
            case life.TellAdmitted(needs_prefill=needs_prefill):
                self._send(Admitted, key, needs_prefill=needs_prefill)
            case life.TellFinished(finished=finished):
                self._send(
                    Finished,
                    key,
                    reason=finished.reason,
                    stop_token_id=finished.stop_token_id,
                    steps=finished.steps,
                    accepted_drafts=finished.accepted_drafts,
                    proposed_drafts=finished.proposed_drafts,
                )
            case life.TellRefused(code=code, message=message):
                self._send(Refused, key, code=code, message=message)
            case life.TellFailed(code=code, message=message):
                self._send(Failed, key, code=code, message=message)
            case life.TellCancelled():
                self._send(Cancelled, key)

    def _send(self, kind: type[RequestMessage], key: RequestKey, **values: object) -> None:
        self._doors.tell_router(
            kind.model_validate({"epoch": self._epoch, "request_id": key.request_id, "generation": key.generation} | values)
        )

    # ---- hand-offs -----------------------------------------------------------------------------------------------

    def _begin(self, key: RequestKey, attempt: Attempt) -> None:
        landing, place = attempt.landing, attempt.admit.prefill
        assert landing is not None
        assert place is not None
        connection = self._doors.connection(place.epoch)
        if connection is None:  # it went while the engine was asked
            self._live(key, life.HandoffBroken("prefill_lost", "the prefill worker is gone"))
            self._live(key, life.HandoffClosed())
            return
        reservation = Reservation(
            key=key,
            epoch=self._epoch,
            peer=place.epoch,
            fingerprint=self._fingerprint,
            blocks=landing.blocks,
            slot=landing.slot,
            position=landing.position,
            token_digest=token_digest(attempt.admit.token_ids[:-1]),
            have_blocks=landing.have_blocks,
            checksums=self._checksums,
            max_bytes=self._max_message_bytes,
            first_tag=next(self._tags) * TAGS_PER_HANDOFF,
        )
        machine = HandoffReceiver(reservation)
        attempt.session = ReceiveSession(machine, connection, self._layout, lambda command: self._on_handoff(key, attempt, command))
        attempt.session.feed(receive.Begin())

    def _on_handoff(self, key: RequestKey, attempt: Attempt, command: ReceiveCommand) -> None:
        match command:
            case Say(message=message):
                assert attempt.admit.prefill is not None
                self._doors.tell_peer(attempt.admit.prefill.epoch, message)
            case Fail(code=code, message=text):
                log.info("%s: hand-off failed: %s: %s", key, code, text)
                self._live(key, life.HandoffBroken(code, text))
            case Commit():
                self._live(key, self._complete(attempt))
            case Ended(ok=ok):
                self._count_ended(attempt, ok=ok)
                if not ok:
                    self._live(key, life.HandoffClosed())

    def _complete(self, attempt: Attempt) -> life.HandoffComplete:
        assert attempt.manifest is not None
        assert attempt.session is not None
        return life.HandoffComplete(
            at=time.monotonic(),
            manifest_at=attempt.manifest_at,
            prefill=attempt.manifest.timing,
            num_bytes=attempt.session.machine.num_bytes,
            cached_tokens=attempt.manifest.cached_tokens,
        )

    def _count_ended(self, attempt: Attempt, *, ok: bool) -> None:
        assert attempt.session is not None
        self.counts["baton_handoffs_received_total" if ok else "baton_handoffs_failed_total"] += 1
        self.counts["baton_handoff_received_bytes_total"] += attempt.session.machine.num_bytes
        self.counts["baton_stale_messages_total"] += attempt.session.machine.stale


def _raise_failure(future: Future[bool]) -> None:
    """An engine that can't even cancel is gone, and the worker with it (the bridge says why)."""
    error = future.exception()
    if error is not None and not isinstance(error, EngineStopped):
        raise error
