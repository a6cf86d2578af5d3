"""The prefill workers that this decode worker fetches from: dialing, pairing, watching, dialing again.

A peer is one life of a P worker (its epoch), as the router names it. As long as the router names it, it is dialed again whenever it was
lost; one that refuses to pair stays refused: neither of us will change in this life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from protocol.codec import decode_from_p, encode
from protocol.errors import ConfigError, FingerprintMismatch, PeerLost, TransferError, WireError
from protocol.ids import Epoch
from protocol.messages import (
    Fingerprint,
    HandoffFailed,
    Manifest,
    Message,
    NotPaired,
    PairBye,
    PairHello,
    PairRefused,
    PairWelcome,
    PeerPing,
    PeerPong,
    PrefillPlace,
    PrefillToDecode,
    Ready,
)
from protocol.sockets import DEAD_AFTER_S, HEARTBEAT_S, Link
from transfer.fingerprint import first_difference
from transfer.transport import Connection, Transport

log = logging.getLogger("baton.peers")

WELCOME_S = 3.0
"""A pair hello that nobody answered for this long is said again, on a new connection."""
REDIAL_S = 0.5

HandoffMessage = Ready | Manifest | HandoffFailed


class PairingRefused(Exception):
    """P won't pair with us, or we not with it, for as long as both live."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    on_message: Callable[[Epoch, HandoffMessage], None]
    on_paired: Callable[[Epoch], None]
    on_refused: Callable[[Epoch, str, str], None]
    """epoch, field, reason."""
    on_lost: Callable[[Epoch, str], None]
    """A paired peer is gone, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ourselves:
    epoch: Epoch
    fingerprint: Fingerprint
    transport: Transport


class PrefillPeers:
    def __init__(
        self, ourselves: Ourselves, callbacks: Callbacks, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """``spawn``: start a task whose failure is the worker's."""
        self._ourselves, self._callbacks, self._spawn = ourselves, callbacks, spawn
        self._peers: dict[Epoch, PrefillPeer] = {}
        self._tasks: dict[Epoch, asyncio.Task[None]] = {}

    def update(self, places: tuple[PrefillPlace, ...]) -> None:
        """The router's word on who lives: dial the new ones, drop the others, and tell again what is known of the rest: a router that
        was started anew doesn't know.
        """
        named = {place.epoch: place for place in places}
        for epoch in self._peers.keys() - named.keys():
            self._peers.pop(epoch).dismissed = True
            self._tasks.pop(epoch).cancel()
        for peer in self._peers.values():
            peer.report()
        for epoch in named.keys() - self._peers.keys():
            peer = PrefillPeer(named[epoch], self._ourselves, self._callbacks)
            self._peers[epoch] = peer
            self._tasks[epoch] = self._spawn(peer.run())

    async def leave(self) -> None:
        """Say goodbye to all; ``close`` afterwards."""
        for peer in list(self._peers.values()):
            await peer.leave()

    def close(self) -> None:
        self.update(())

    def connection(self, epoch: Epoch) -> Connection | None:
        """None: not paired (any more)."""
        peer = self._peers.get(epoch)
        return peer.connection if peer is not None else None

    def say(self, to: Epoch, message: Message) -> None:
        """In order, never blocks. To a peer that is lost: dropped, its hand-offs have ended."""
        peer = self._peers.get(to)
        if peer is not None:
            peer.say(message)


class PrefillPeer:
    """One P as this worker sees it. ``run`` it until the router doesn't name it any more, then cancel it."""

    def __init__(self, place: PrefillPlace, ourselves: Ourselves, callbacks: Callbacks) -> None:
        self.place, self._ourselves, self._callbacks = place, ourselves, callbacks
        self.connection: Connection | None = None
        """Only while paired."""
        self.dismissed = False
        """Set before ``run`` is cancelled: a task group whose own task has failed in the same breath drops the cancel."""
        self._refused: PairingRefused | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._broken: asyncio.Future[str] | None = None
        self._heard_at = 0.0

    def say(self, message: Message) -> None:
        if self.connection is not None:
            self._outbox.put_nowait(encode(message))

    async def leave(self) -> None:
        """Say goodbye after everything that was said before; then cancel ``run``."""
        self.say(PairBye(epoch=self._ourselves.epoch))
        if self.connection is not None:
            await self._outbox.join()

    async def run(self) -> None:
        try:
            while not self.dismissed:
                await self._pair_once()
                await asyncio.sleep(REDIAL_S)
        except PairingRefused as refused:
            log.error("not paired with %s: %s: %s", self.place.worker_id, refused.field, refused)
            self._refused = refused
            self.report()

    def report(self) -> None:
        """How the pairing went, if that is known."""
        if self.connection is not None:
            self._callbacks.on_paired(self.place.epoch)
        elif self._refused is not None:
            self._callbacks.on_refused(self.place.epoch, self._refused.field, str(self._refused))

    async def _pair_once(self) -> None:
        """From dialing to losing it. Returns when it's worth trying again."""
        try:
            link = Link(self.place.address, self._ourselves.epoch.encode())
        except ConfigError as error:
            raise PairingRefused("peer_address", str(error)) from None
        try:
            welcome = await self._shake_hands(link)
            if welcome is not None:
                await self._stay_paired(link, self._connect(welcome))
        finally:
            link.close()

    async def _shake_hands(self, link: Link) -> PairWelcome | None:
        """None: no answer in time. Raises PairingRefused."""
        ours = self._ourselves
        transport = ours.transport
        await link.send(
            encode(PairHello(epoch=ours.epoch, fingerprint=ours.fingerprint, data_address=transport.address, transport=transport.name))
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WELCOME_S):
                while True:
                    message = self._decode(await link.recv())
                    if isinstance(message, PairRefused):
                        raise PairingRefused(message.field, message.message)
                    if isinstance(message, PairWelcome):
                        return message
        log.warning("no answer from prefill worker %s at %s", self.place.worker_id, self.place.address)
        return None

    def _connect(self, welcome: PairWelcome) -> Connection:
        ours = self._ourselves
        mismatch: FingerprintMismatch | None = first_difference(ours.fingerprint, welcome.fingerprint)
        if mismatch is not None:
            raise PairingRefused(mismatch.field, str(mismatch))
        if welcome.transport != ours.transport.name:
            raise PairingRefused("transport", f"ours is {ours.transport.name}, theirs {welcome.transport}")
        try:
            return ours.transport.connect(welcome.data_address)
        except TransferError as error:
            raise PairingRefused("data_address", str(error)) from None

    async def _stay_paired(self, link: Link, connection: Connection) -> None:
        self._broken = asyncio.get_running_loop().create_future()
        self._outbox = asyncio.Queue()
        self.connection = connection
        self._heard_at = time.monotonic()
        connection.on_lost(self._break)
        log.info("paired with prefill worker %s", self.place.worker_id)
        self.report()
        reason = "the router doesn't name it any more"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(link))
                tasks.create_task(self._send_outbox(link))
                tasks.create_task(self._ping())
                tasks.create_task(self._until_broken())
        except* PeerLost as group:
            reason = str(group.exceptions[0])
        finally:
            self.connection = None
            log.warning("lost prefill worker %s: %s", self.place.worker_id, reason)
            self._callbacks.on_lost(self.place.epoch, reason)
            connection.close()  # ends what is still in flight

    def _break(self, reason: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)

    async def _until_broken(self) -> None:
        assert self._broken is not None
        raise PeerLost(await self._broken)

    async def _receive(self, link: Link) -> None:
        while True:
            message = self._decode(await link.recv())
            if message is None:
                continue
            self._heard_at = time.monotonic()
            match message:
                case Ready() | Manifest() | HandoffFailed():
                    self._callbacks.on_message(self.place.epoch, message)
                case PeerPong():
                    pass
                case NotPaired():
                    raise PeerLost("it doesn't know this worker any more")
                case PairWelcome() | PairRefused():
                    log.warning("%s from %s, which we are paired with", message.type, self.place.worker_id)

    async def _send_outbox(self, link: Link) -> None:
        while True:
            data = await self._outbox.get()
            if not await link.send(data):
                raise PeerLost("it reads nothing")
            self._outbox.task_done()

    async def _ping(self) -> None:
        """When this process itself was held up, the peer's silence says nothing; but after a long one the peer has given us up."""
        while True:
            self.say(PeerPing(epoch=self._ourselves.epoch))
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - before > DEAD_AFTER_S:
                raise PeerLost(f"this process was held up for {now - before - HEARTBEAT_S:.1f} s")
            if now - before > 2 * HEARTBEAT_S:
                self._heard_at = now
            if now - self._heard_at > DEAD_AFTER_S:
                raise PeerLost(f"nothing heard from it for {DEAD_AFTER_S} s")

    def _decode(self, data: bytes) -> PrefillToDecode | None:
        """None for what isn't this life of P talking."""
        try:
            message: PrefillToDecode = decode_from_p.decode(data)
        except WireError as error:
            log.error("dropped a message from %s: %s", self.place.worker_id, error)
            return None
        if message.epoch != self.place.epoch:
            log.warning("dropped %s from another life of %s", message.type, self.place.worker_id)
            return None
        return message
