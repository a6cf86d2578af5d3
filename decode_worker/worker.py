"""The decode worker: an engine, pairings with prefill workers, a link to the router, and what holds them together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from decode_worker.peers import Callbacks, Ourselves, PrefillPeers
from decode_worker.requests import DecodeRequests, Doors
from engine.audit import Violation
from engine.bridge import EngineBridge
from engine.core import EngineCore
from engine.serving import audit_found, flush_cache, load_core, make_hello
from protocol.config import DecodeSettings
from protocol.ids import Epoch, new_epoch
from protocol.messages import Admit, Cancel, Drain, FlushCache, Heartbeat, Hello, Paired, Peers
from protocol.sockets import Link
from protocol.worker_link import Order, WorkerLink
from protocol.worker_process import Departure, serve
from transfer import ucx
from transfer.fingerprint import make_fingerprint
from transfer.layout import Layout
from transfer.transport import Transport

log = logging.getLogger("baton.decode")


async def run(settings: DecodeSettings) -> None:
    """Until this process was asked to leave. Raises ConfigError and CheckpointError before anything is served, Unwelcomed later."""
    core = await asyncio.to_thread(load_core, settings)
    transport = ucx.UcxTransport()
    try:
        worker = DecodeWorker(settings, core, transport, ucx.version())
        worker.departure.listen()
        await worker.run()
    finally:
        transport.close()


class DecodeWorker:
    def __init__(self, settings: DecodeSettings, core: EngineCore, transport: Transport, transport_info: str) -> None:
        """``transport_info``: name and version, for people. The caller closes the transport."""
        self.epoch = new_epoch()
        self.core = core
        self._settings, self._transport, self._transport_info = settings, transport, transport_info
        self._layout = Layout(blocks=core.regions[0], slots=core.regions[1])
        self._fingerprint = make_fingerprint(core.model_info, self._layout, core.config.block_tokens)
        self.departure = Departure(settings.drain_timeout_s)

    async def run(self) -> None:
        log.info("transport %s", self._transport_info)
        self._build()
        self.bridge.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._spawn = tasks.create_task
                parts = [self.bridge.watch(), self._link.run()]
                await serve(
                    parts,
                    tasks=tasks,
                    work=self.requests,
                    link=self._link,
                    departure=self.departure,
                    take_nothing_new=self.requests.drain,
                )
                await self._peers.leave()
                self._peers.close()
        finally:
            self._link.close()
            await self.bridge.stop()

    def _build(self) -> None:
        self.bridge = EngineBridge(self.core, lambda events: self.requests.on_engine_events(events), self._on_violations)
        callbacks = Callbacks(
            on_message=lambda epoch, message: self.requests.on_peer_message(epoch, message),
            on_paired=self._on_paired,
            on_refused=self._on_refused,
            on_lost=self._on_lost,
        )
        ourselves = Ourselves(epoch=self.epoch, fingerprint=self._fingerprint, transport=self._transport)
        self._peers = PrefillPeers(ourselves, callbacks, spawn=lambda work: self._spawn(work))
        self._link = WorkerLink(
            Link(self._settings.control, self.epoch.encode()),
            hello=self._hello(),
            heartbeat=self._heartbeat,
            on_message=self._on_order,
            on_router_gone=lambda: self.requests.cancel_all(),
            health_file=self._settings.health_file,
        )
        doors = Doors(tell_router=self._link.send, tell_peer=self._peers.say, connection=self._peers.connection)
        self.requests = DecodeRequests(
            self.bridge,
            self._layout,
            doors,
            epoch=self.epoch,
            fingerprint=self._fingerprint,
            checksums=self._settings.checksums,
            max_message_bytes=self._transport.max_message_bytes,
            max_waiting=self._settings.max_running,
        )

    def _on_order(self, order: Order) -> None:
        match order:
            case Admit():
                self.requests.on_admit(order)
            case Cancel():
                self.requests.on_cancel(order)
            case FlushCache():
                self.bridge.ask(lambda core: flush_cache(core, order, self.epoch), lambda told: self._link.send(told.result()))
            case Peers():
                self._peers.update(order.prefill)
            case Drain():
                self.departure.ask()
            case _:
                log.warning("dropped %s: not an order for a decode worker", order.type)

    def _on_paired(self, peer: Epoch) -> None:
        self._link.send(Paired(epoch=self.epoch, peer=peer, ok=True))

    def _on_refused(self, peer: Epoch, field: str, reason: str) -> None:
        self._link.send(Paired(epoch=self.epoch, peer=peer, ok=False, field=field, reason=reason))

    def _on_lost(self, peer: Epoch, reason: str) -> None:
        self._link.send(Paired(epoch=self.epoch, peer=peer, ok=False, reason=reason))
        self.requests.on_peer_lost(peer, reason)

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
            role="decode",
            fingerprint=self._fingerprint,
            transport=self._transport_info,
        )
