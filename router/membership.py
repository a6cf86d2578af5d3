"""Who belongs to the cluster: hello and welcome, heartbeats, pairing, and who is lost. Knows nothing of requests."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from pydantic import BaseModel

from protocol.codec import encode
from protocol.ids import Epoch, new_epoch
from protocol.messages import Goodbye, Heartbeat, Hello, HelloAgain, Paired, Peers, Unwelcome, Welcome
from protocol.sockets import DEAD_AFTER_S, HEARTBEAT_S
from router.metrics import Metrics
from router.workers import UNREACHABLE, Worker, WorkerTable, why_unpaired

LATE_S = 0.5
"""A watchdog that comes later than this was held up, and so may have been the reading of heartbeats."""
LEFT = "it left"
STRANGERS = 256
"""So many unknown workers are remembered, so that each is warned of once."""

log = logging.getLogger("baton.router")


class Transport(Protocol):
    """The part of router.hub.Hub that is used here."""

    def send(self, identity: bytes, message: bytes) -> bool: ...


class Membership:
    """``on_lost`` is called when a worker is out of the table already; ``on_room`` when waiting requests may have a chance."""

    def __init__(
        self,
        table: WorkerTable,
        transport: Transport,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        on_lost: Callable[[Worker, str], None],
        on_room: Callable[[], None],
    ) -> None:
        self.table = table
        self.epoch = new_epoch()
        self._transport = transport
        self._metrics = metrics
        self._clock = clock
        self._on_lost = on_lost
        self._on_room = on_room
        self._watched_at = clock()
        self._held_up = False
        self._strangers: OrderedDict[Epoch, None] = OrderedDict()

    def send(self, worker: Worker, message: BaseModel) -> bool:
        """False: it can't be reached and counts as silent. The watchdog, which isn't in the middle of something, loses it."""
        sent = self._transport.send(worker.identity, encode(message))
        if not sent:
            worker.heard_at = UNREACHABLE
        return sent

    def on_message(self, message: Hello | Heartbeat | Paired | Goodbye) -> None:
        if isinstance(message, Hello):
            self._on_hello(message)
            return
        worker = self.table.get(message.epoch)
        if worker is None:
            self._on_stranger(message)
            return
        worker.heard_at = self._clock()
        match message:
            case Heartbeat():
                self._on_heartbeat(worker, message)
            case Paired():
                self._on_paired(worker, message)
            case Goodbye():
                self._lose(worker, LEFT)

    def watch(self) -> None:
        """Called often: who is silent? After a hold-up of ours, heartbeats that wait to be read get one round to be read first."""
        now = self._clock()
        late, self._watched_at = now - self._watched_at > LATE_S, now
        self._held_up = late and not self._held_up
        if self._held_up:
            log.warning("the router was held up; silence is judged later")
            return
        for worker in self.table.silent_since(now - DEAD_AFTER_S):
            self._lose(worker, f"no heartbeat for {now - worker.heard_at:.1f} s" if worker.reachable else "it can't be reached")

    def _on_hello(self, hello: Hello) -> None:
        rejection = self.table.check(hello)
        if rejection is not None:
            log.error("%s is not welcome: %s", hello.worker_id, rejection.message)
            unwelcome = Unwelcome(epoch=self.epoch, field=rejection.field, message=rejection.message)
            self._transport.send(hello.epoch.encode(), encode(unwelcome))
            return
        earlier = self.table.predecessor(hello)
        if earlier is not None:
            self._lose(earlier, "it was started anew", superseded=True)
        known = self.table.get(hello.epoch)  # it repeats itself: our welcome was slow
        worker = known or self.table.add(hello)
        self._strangers.pop(hello.epoch, None)
        worker.heard_at = self._clock()
        log.info("%s worker %s %s (epoch %s)", hello.role, hello.worker_id, "says hello again" if known else "joined", hello.epoch)
        self.send(worker, Welcome(epoch=self.epoch, heartbeat_s=HEARTBEAT_S))
        self._send_peers([worker] if hello.role == "decode" else self.table.decodes)
        self._on_room()

    def _on_stranger(self, message: Heartbeat | Paired | Goodbye) -> None:
        """We were started anew, or took it for dead."""
        if not isinstance(message, Goodbye):
            self._metrics.dropped["unknown"] += 1
            if message.epoch not in self._strangers:
                self._strangers[message.epoch] = None
                log.warning("a worker that hasn't said hello (epoch %s) is asked for it", message.epoch)
            if len(self._strangers) > STRANGERS:
                self._strangers.popitem(last=False)
            self._transport.send(message.epoch.encode(), encode(HelloAgain(epoch=self.epoch)))

    def _on_heartbeat(self, worker: Worker, message: Heartbeat) -> None:
        if message.draining and not worker.draining:
            log.info("%s is draining", worker.worker_id)
        self.table.note_heartbeat(worker, message)
        self._on_room()

    def _on_paired(self, worker: Worker, message: Paired) -> None:
        self.table.note_paired(worker, message)
        peer = self.table.get(message.peer)
        name = peer.worker_id if peer else f"a prefill worker that has left (epoch {message.peer})"
        if message.ok:
            log.info("%s is paired with %s", worker.worker_id, name)
        else:
            leaves = peer is None or peer.draining
            log.log(logging.INFO if leaves else logging.ERROR, "%s isn't paired with %s: %s", worker.worker_id, name, why_unpaired(message))

    def _send_peers(self, decodes: list[Worker]) -> None:
        peers = Peers(epoch=self.epoch, prefill=tuple(worker.place for worker in self.table.prefills))
        for worker in decodes:
            self.send(worker, peers)

    def _lose(self, worker: Worker, reason: str, *, superseded: bool = False) -> None:
        self.table.remove(worker, superseded=superseded)
        if worker.requests or reason != LEFT:
            self._metrics.lost[worker.hello.role] += 1
            log.error("lost %s worker %s with %d requests: %s", worker.hello.role, worker.worker_id, len(worker.requests), reason)
        else:
            log.info("%s worker %s left", worker.hello.role, worker.worker_id)
        if worker.hello.role == "prefill":
            self._send_peers(self.table.decodes)
        self._on_lost(worker, reason)
