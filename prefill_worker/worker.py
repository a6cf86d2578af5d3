"""The prefill worker: an engine, a door for decode workers, a link to the router, and what holds them together."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence

from engine.audit import Violation
from engine.bridge import EngineBridge
from engine.core import EngineCore
from engine.serving import audit_found, flush_cache, load_core, make_hello
from prefill_worker.peers import DecodePeers
from prefill_worker.requests import Doors, PrefillRequests
from protocol.config import PrefillSettings
from protocol.errors import ConfigError
from protocol.ids import new_epoch
from protocol.messages import Cancel, Drain, FlushCache, Heartbeat, Hello, Prefill
from protocol.sockets import HEARTBEAT_S, Hub, Link
from protocol.worker_link import Order, WorkerLink
from protocol.worker_process import Departure, local_address_towards, serve
from transfer import ucx
from transfer.fingerprint import make_fingerprint
from transfer.layout import Layout
from transfer.transport import Transport

log = logging.getLogger("baton.prefill")

TICK_S = HEARTBEAT_S / 5


async def run(settings: PrefillSettings) -> None:
    """Until this process was asked to leave. Raises ConfigError and CheckpointError before anything is served, Unwelcomed later."""
    peer_host = settings.peer_host or local_address_towards(settings.control)
    hub = Hub(f"tcp://{_resolved(settings.peer_bind or peer_host)}:{settings.peer_port}")
    try:
        core = await asyncio.to_thread(load_core, settings)
        transport = ucx.UcxTransport()
        try:
            worker = PrefillWorker(settings, core, hub, f"tcp://{peer_host}:{hub.port}", transport, ucx.version())
            worker.departure.listen()
            await worker.run()
        finally:
            transport.close()
    finally:
        hub.close()


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"peer_host={host!r}: {error.strerror}") from None


class PrefillWorker:
    def __init__(
        self, settings: PrefillSettings, core: EngineCore, hub: Hub, peer_address: str, transport: Transport, transport_info: str
    ) -> None:
        """``transport_info``: name and version, for people. The caller closes hub and transport."""
        self.epoch = new_epoch()
        self.core = core
        self._settings, self._hub, self._transport = settings, hub, transport
        self._peer_address, self._transport_info = peer_address, transport_info
        self._layout = Layout(blocks=core.regions[0], slots=core.regions[1])
        self._fingerprint = make_fingerprint(core.model_info, self._layout, core.config.block_tokens)
        self.departure = Departure(settings.drain_timeout_s)

    async def run(self) -> None:
        log.info("decode workers dial %s; transport %s", self._peer_address, self._transport_info)
        self._build()
        self.bridge.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._spawn = tasks.create_task
                parts = [self.bridge.watch(), self._peers.run(), self._link.run(), self._tick()]
                await serve(parts, tasks=tasks, work=self.requests, link=self._link, departure=self.departure)
        finally:
            self._link.close()
            self._peers.close()
            await self.bridge.stop()

    def _build(self) -> None:
        self.bridge = EngineBridge(self.core, lambda events: self.requests.on_engine_events(events), self._on_violations)
        self._peers = DecodePeers(
            self._hub,
            self._transport,
            epoch=self.epoch,
            fingerprint=self._fingerprint,
            on_message=lambda peer, message: self.requests.on_peer_message(peer, message),
            on_lost=lambda epoch, reason: self.requests.on_peer_lost(epoch, reason),
        )
        self._link = WorkerLink(
            Link(self._settings.control, self.epoch.encode()),
            hello=self._hello(),
            heartbeat=self._heartbeat,
            on_message=self._on_order,
            on_router_gone=lambda: self.requests.cancel_all(),
            health_file=self._settings.health_file,
        )
        doors = Doors(
            tell_router=self._link.send,
            tell_peer=self._peers.say,
            is_paired=self._peers.is_paired,
            spawn=lambda work: self._spawn(work),
        )
        self.requests = PrefillRequests(
            self.bridge,
            self._layout,
            doors,
            epoch=self.epoch,
            fingerprint=self._fingerprint,
            lease_s=self._settings.lease_s,
            checksums=self._settings.checksums,
        )

    def _on_order(self, order: Order) -> None:
        match order:
            case Prefill():
                self.requests.on_prefill(order)
            case Cancel():
                self.requests.on_cancel(order.key)
            case FlushCache():
                self.bridge.ask(lambda core: flush_cache(core, order, self.epoch), lambda told: self._link.send(told.result()))
            case Drain():
                self.departure.ask()
            case _:
                log.warning("dropped %s: not an order for a prefill worker", order.type)

    async def _tick(self) -> None:
        while True:
            self.requests.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _on_violations(self, found: Sequence[Violation]) -> None:
        for violation in found:
            self._link.send(audit_found(violation, self.epoch))

    def _heartbeat(self) -> Heartbeat:
        counters = self.bridge.counters | dict(self.requests.counts)
        return Heartbeat(epoch=self.epoch, load=self.bridge.load, draining=self.departure.asked, counters=counters)

    def _hello(self) -> Hello:
        return make_hello(
            self._settings,
            self.core,
            epoch=self.epoch,
            role="prefill",
            fingerprint=self._fingerprint,
            transport=self._transport_info,
            peer_address=self._peer_address,
        )
