"""The decode workers that this prefill worker serves: pairing, watching them, talking to them.

A peer is one life of a D worker (its epoch). It is lost when its transport breaks, when it was silent for too long, when it can't be
told something, or when it pairs anew; it comes back only by pairing anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.codec import decode_from_d, encode
from protocol.errors import TransferError, WireError
from protocol.ids import Epoch
from protocol.messages import (
    DecodeToPrefill,
    Fetch,
    Fingerprint,
    Message,
    NotPaired,
    PairBye,
    PairHello,
    PairRefused,
    PairWelcome,
    PeerPing,
    PeerPong,
    Pull,
    Release,
)
from protocol.sockets import DEAD_AFTER_S, HEARTBEAT_S, Hub
from transfer.fingerprint import first_difference
from transfer.transport import Connection, Transport

log = logging.getLogger("baton.peers")

HandoffMessage = Fetch | Pull | Release


@dataclass(slots=True)
class DecodePeer:
    epoch: Epoch
    connection: Connection
    heard_at: float


class DecodePeers:
    """``on_message`` gets what paired peers say about hand-offs, ``on_lost`` the epoch of a lost one and why."""

    def __init__(
        self,
        hub: Hub,
        transport: Transport,
        *,
        epoch: Epoch,
        fingerprint: Fingerprint,
        on_message: Callable[[DecodePeer, HandoffMessage], None],
        on_lost: Callable[[Epoch, str], None],
    ) -> None:
        self._hub = hub
        self._transport = transport
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._on_message = on_message
        self._on_lost = on_lost
        self._peers: dict[Epoch, DecodePeer] = {}
        self._outbox: asyncio.Queue[tuple[Epoch, bytes]] = asyncio.Queue()

    def say(self, to: Epoch, message: Message) -> None:
        """In order, never blocks. A peer that can't be reached is lost."""
        self._outbox.put_nowait((to, encode(message)))

    def is_paired(self, epoch: Epoch) -> bool:
        return epoch in self._peers

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._send_outbox())
            tasks.create_task(self._watch())

    async def flush(self) -> None:
        """All that was said is with the transport. Call while ``run`` runs."""
        await self._outbox.join()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.connection.close()
        self._peers.clear()
        self._hub.close()

    # ---- in and out ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            identity, data = await self._hub.recv()
            try:
                message: DecodeToPrefill = decode_from_d.decode(data)
            except WireError as error:
                log.error("dropped a message from a decode worker: %s", error)
                continue
            if identity != message.epoch.encode():
                log.error("dropped %s: epoch %s on the connection of %r", message.type, message.epoch, identity)
                continue
            self._handle(message)

    async def _send_outbox(self) -> None:
        while True:
            to, data = await self._outbox.get()
            if not await self._hub.send(to.encode(), data):
                self._lose(to, "it can't be reached")
            self._outbox.task_done()

    def _handle(self, message: DecodeToPrefill) -> None:
        if isinstance(message, PairHello):
            self._pair(message)
            return
        peer = self._peers.get(message.epoch)
        if peer is None:
            log.warning("dropped %s from %s, which isn't paired", message.type, message.epoch)
            if not isinstance(message, PairBye):
                self.say(message.epoch, NotPaired(epoch=self._epoch))
            return
        peer.heard_at = time.monotonic()
        match message:
            case PeerPing():
                self.say(peer.epoch, PeerPong(epoch=self._epoch))
            case PairBye():
                self._lose(peer.epoch, "it said goodbye")
            case _:
                self._on_message(peer, message)

    # ---- pairing and losing --------------------------------------------------------------------------------------

    def _pair(self, hello: PairHello) -> None:
        self._lose(hello.epoch, "it pairs anew")
        mismatch = first_difference(self._fingerprint, hello.fingerprint)
        if mismatch is not None:
            self._refuse(hello.epoch, mismatch.field, str(mismatch))
            return
        if hello.transport != self._transport.name:
            self._refuse(hello.epoch, "transport", f"ours is {self._transport.name}, theirs {hello.transport}")
            return
        try:
            connection = self._transport.connect(hello.data_address)
        except TransferError as error:
            self._refuse(hello.epoch, "data_address", str(error))
            return
        peer = DecodePeer(hello.epoch, connection, time.monotonic())
        self._peers[hello.epoch] = peer
        connection.on_lost(lambda reason: self._lose(peer.epoch, reason))
        log.info("paired with decode worker %s", hello.epoch)
        welcome = PairWelcome(
            epoch=self._epoch, fingerprint=self._fingerprint, data_address=self._transport.address, transport=self._transport.name
        )
        self.say(hello.epoch, welcome)

    def _refuse(self, to: Epoch, field: str, message: str) -> None:
        log.error("refused to pair with decode worker %s because of %s: %s", to, field, message)
        self.say(to, PairRefused(epoch=self._epoch, field=field, message=message))

    def _lose(self, epoch: Epoch, reason: str) -> None:
        peer = self._peers.pop(epoch, None)
        if peer is None:
            return
        log.warning("lost decode worker %s: %s", epoch, reason)
        self._on_lost(epoch, reason)
        peer.connection.close()  # ends what is still in flight

    async def _watch(self) -> None:
        """Peers ping; one that doesn't is lost. When this process itself was stopped for a while, they get another chance."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - before > 2 * HEARTBEAT_S:
                for peer in self._peers.values():
                    peer.heard_at = now
            for peer in [peer for peer in self._peers.values() if now - peer.heard_at > DEAD_AFTER_S]:
                self._lose(peer.epoch, f"nothing heard from it for {DEAD_AFTER_S} s")
