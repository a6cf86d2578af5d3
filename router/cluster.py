"""The shell around request lives: messages in, commands out, and deadlines. All on one event loop, nothing awaited.

A request goes in by ``submit`` with a sink, which hears tokens and then exactly one ending, unless ``cancel`` came first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from protocol.codec import decode_from_worker
from protocol.errors import WireError
from protocol.ids import RequestId
from protocol.messages import (
    Admitted,
    AuditFound,
    CacheFlushed,
    Cancelled,
    Failed,
    Fingerprint,
    Finished,
    PrefillDone,
    Refused,
    RequestMessage,
    Tokens,
    WorkerToRouter,
)
from router.accounts import Accounts
from router.audit import AuditBook
from router.booking import Booking
from router.events import ClientGone, DeadlinePassed, GivenUp, WorkerLost
from router.flush import CacheFlushes, Flushed
from router.lifecycle import RequestLife, State
from router.lives import Lives
from router.membership import LEFT, Membership, Transport
from router.metrics import Metrics
from router.request import Order, Request, Sink
from router.waiting import WaitingLine
from router.workers import Worker, WorkerTable

WATCH_S = 0.1
MAX_RETRY_AFTER_S = 60
STOPPING = "the server is stopping"

log = logging.getLogger("baton.router")


class Cluster:
    """Everything between the HTTP side and the workers."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        transport: Transport,
        metrics: Metrics,
        queue_limit: int,
        request_timeout_s: float,
        local_prefill_tokens: int,
        local_tail_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self.members = Membership(table, transport, metrics, clock=clock, on_lost=self._on_lost, on_room=self._on_room)
        self.epoch = self.members.epoch
        self.audit = AuditBook()
        self._flushes = CacheFlushes(self.members)
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        """In order of arrival, so in order of deadline too."""
        self._num_arrived = 0
        self._queue = WaitingLine()
        self._stopping = False
        self._booking = Booking(self.members, local_tail_tokens)
        self._accounts = Accounts(metrics, clock)
        self._lives = Lives(
            self._requests,
            self._queue,
            table,
            self._booking,
            self._accounts,
            queue_limit=queue_limit,
            local_prefill_tokens=local_prefill_tokens,
            clock=clock,
        )
        metrics.workers = lambda: self.table
        metrics.num_waiting = lambda: len(self._queue)
        metrics.num_running = lambda: len(self._requests) - len(self._queue)

    # ---- requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def submit(self, order: Order, sink: Sink) -> None:
        """Place it now or let it wait. The sink may hear its ending before this returns."""
        life = RequestLife(order.request_id, order.sampling.max_tokens)
        request = Request(order, sink, life, self._num_arrived, self._clock())
        self._num_arrived += 1
        self._requests[order.request_id] = request
        if self._stopping:
            self._lives.tell(request, GivenUp("stopping", STOPPING))
        else:
            self._lives.placer.place_new(request)

    def cancel(self, request_id: RequestId) -> None:
        """The client left, or doesn't want this sequence any more. Nothing happens if it is over."""
        request = self._requests.get(request_id)
        if request is not None:
            self._lives.tell(request, ClientGone())

    def retry_after_s(self) -> int:
        """How long until a place in the queue is likely to be free."""
        slots = sum(worker.hello.capacity.max_running for worker in self.table.decodes) or 1
        return max(1, min(MAX_RETRY_AFTER_S, round(self._accounts.mean_request_s * (1 + len(self._queue)) / slots)))

    def refuse_new(self) -> None:
        """From now on nothing is taken; what runs goes on."""
        self._stopping = True

    def stop(self) -> int:
        """Ends every request; its workers are told. Returns how many there were."""
        self._stopping = True
        orphans = list(self._requests.values())
        for request in orphans:
            if request.life.state is not State.ENDED:  # one that ends may take others along
                self._lives.tell(request, GivenUp("stopping", STOPPING))
        return len(orphans)

    # ---- messages from workers

    def on_message(self, identity: bytes, data: bytes) -> None:
        """Of the hub. Whatever a worker sends, it can't hurt more than its own requests."""
        try:
            message: WorkerToRouter = decode_from_worker.decode(data)
        except WireError as error:
            self._drop("undecodable", f"from {identity!r}: {error}")
            return
        if message.epoch.encode() != identity:
            self._drop("foreign", f"{message.type} of {message.epoch} came from {identity!r}")
        elif isinstance(message, RequestMessage):
            self._on_request_message(message)
        elif isinstance(message, CacheFlushed):
            self._flushes.on_flushed(message)
        elif isinstance(message, AuditFound):
            self._note_audit(message)
        else:
            self.members.on_message(message)

    def _on_request_message(self, message: Admitted | Refused | Tokens | Finished | Failed | Cancelled | PrefillDone) -> None:
        request = self._requests.get(message.request_id)
        if request is None or not request.life.concerns(message):
            self._metrics.dropped["ended" if request is None else "stale"] += 1
            return
        if isinstance(message, Admitted):
            self._accounts.admitted(request)
            self._note_admitted(request, message)
        elif isinstance(message, PrefillDone):
            self._booking.note_prefill_done(message)
        if self._stopping and isinstance(message, Cancelled):  # whoever stops us stops the workers too
            self._lives.tell(request, GivenUp("stopping", STOPPING))
        else:
            self._lives.tell(request, message)

    def _note_admitted(self, request: Request, message: Admitted) -> None:
        worker = self.table.get(message.epoch)
        if worker is not None:
            worker.held.note(request.order.chain)

    def _note_audit(self, message: AuditFound) -> None:
        worker = self.table.get(message.epoch)
        if worker is not None:
            self.audit.note(worker, message)

    def _drop(self, why: str, what: str) -> None:
        self._metrics.dropped[why] += 1
        log.warning("dropped a message (%s): %s", why, what)

    # ---- time and loss

    def watch(self) -> None:
        """Called every WATCH_S: who is silent, what is late."""
        self.members.watch()
        arrived_before = self._clock() - self._request_timeout_s
        while self._requests:
            oldest = next(iter(self._requests.values()))
            if oldest.arrived_at > arrived_before:
                return
            self._lives.tell(oldest, DeadlinePassed())

    def _on_lost(self, worker: Worker, reason: str) -> None:
        for request_id in list(worker.requests):
            request = self._requests.get(request_id)
            if request is not None:  # one that ended may have taken others along
                leaving = self._stopping and reason == LEFT  # as in _on_request_message
                self._lives.tell(request, GivenUp("stopping", STOPPING) if leaving else WorkerLost(worker.epoch, reason))
        self._flushes.on_lost(worker)
        self._lives.placer.place_soon()

    def _on_room(self) -> None:
        self._lives.placer.place_soon()

    # ---- caches

    async def flush_caches(self) -> Flushed:
        """Of all workers. What is in use now is kept until it isn't."""
        return await self._flushes.flush(list(self.table))

    # ---- what it looks like from outside

    def max_model_len(self, default: int) -> int:
        """The longest prompt and output together that any decode worker holds; ``default`` while there is none."""
        return max((worker.max_tokens for worker in self.table.decodes), default=default)

    def fingerprint(self) -> Fingerprint | None:
        return self.table.fingerprint
