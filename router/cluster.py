"""The shell around request lives: messages in, commands out, and deadlines. All on one event loop, nothing awaited.

A request goes in by ``submit`` with a sink, which hears tokens and then exactly one ending, unless ``cancel`` came first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from protocol.codec import decode_from_worker
from protocol.errors import IllegalTransition, WireError
from protocol.ids import RequestId
from protocol.messages import (
    Admit,
    Admitted,
    AuditFound,
    CacheFlushed,
    Cancel,
    Cancelled,
    Failed,
    Fingerprint,
    Finished,
    Prefill,
    PrefillDone,
    Refused,
    RequestMessage,
    Tokens,
    WorkerToRouter,
)
from router.audit import AuditBook
from router.events import (
    ClientGone,
    DeadlinePassed,
    Deliver,
    End,
    Ending,
    Event,
    GivenUp,
    Placed,
    Requeue,
    SendAdmit,
    SendCancel,
    SendPrefill,
    SparePrefill,
    StopMatched,
    Undelivered,
    Unpair,
    WorkerLost,
)
from router.events import Command as LifeCommand
from router.flush import CacheFlushes, Flushed
from router.lifecycle import RequestLife, State
from router.membership import LEFT, Membership, Transport
from router.metrics import Metrics
from router.placement import Needs, NoPlace, has_room, place
from router.request import Order, Request, Sink
from router.waiting import WaitingLine
from router.workers import Views, Worker, WorkerTable

WATCH_S = 0.1
MAX_RETRY_AFTER_S = 60
STOPPING = "the server is stopping"
BROKEN = "the router failed at this request"

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
        self.members = Membership(table, transport, metrics, clock=clock, on_lost=self._on_lost, on_room=self._place_soon)
        self.epoch = self.members.epoch
        self.audit = AuditBook()
        self._flushes = CacheFlushes(self.members)
        self._metrics = metrics
        self._queue_limit = queue_limit
        self._request_timeout_s = request_timeout_s
        self._local_prefill_tokens = local_prefill_tokens
        self._local_tail_tokens = local_tail_tokens
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        """In order of arrival, so in order of deadline too."""
        self._num_arrived = 0
        self._queue = WaitingLine()
        self._pass_due = False
        self._stopping = False
        self._mean_request_s = 1.0
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
        if self._pass_due:  # those that wait come first
            self._place_waiting()
        life = RequestLife(order.request_id, order.sampling.max_tokens)
        request = Request(order, sink, life, self._num_arrived, self._clock())
        self._num_arrived += 1
        self._requests[order.request_id] = request
        if self._stopping:
            self._tell(request, GivenUp("stopping", STOPPING))
        else:
            self._place(request, Views(self.table))

    def cancel(self, request_id: RequestId) -> None:
        """The client left, or doesn't want this sequence any more. Nothing happens if it is over."""
        request = self._requests.get(request_id)
        if request is not None:
            self._tell(request, ClientGone())

    def retry_after_s(self) -> int:
        """How long until a place in the queue is likely to be free."""
        slots = sum(worker.hello.capacity.max_running for worker in self.table.decodes) or 1
        return max(1, min(MAX_RETRY_AFTER_S, round(self._mean_request_s * (1 + len(self._queue)) / slots)))

    def refuse_new(self) -> None:
        """From now on nothing is taken; what runs goes on."""
        self._stopping = True

    def stop(self) -> int:
        """Ends every request; its workers are told. Returns how many there were."""
        self._stopping = True
        orphans = list(self._requests.values())
        for request in orphans:
            if request.life.state is not State.ENDED:  # one that ends may take others along
                self._tell(request, GivenUp("stopping", STOPPING))
        return len(orphans)

    # ---- placing

    def _place(self, request: Request, views: Views) -> None:
        """On a worker, into the queue, or to its end. The views are up to date afterwards, if it got where it was to go."""
        try:
            self._try_place(request, views)
        except Exception:
            self._abandon(request, "placing")

    def _try_place(self, request: Request, views: Views) -> None:
        order = request.order
        needs = Needs(
            num_prompt_tokens=len(order.token_ids),
            max_tokens=order.num_tokens,
            local=len(order.token_ids) <= max(1, self._local_prefill_tokens),
            tried=request.tried,
            refused_pairs=request.refused_pairs,
            held={worker.epoch: worker.held.num_tokens(order.chain) for worker in self.table} if order.chain else {},
        )
        choice = place(views.prefills, views.decodes, needs)
        if not isinstance(choice, NoPlace):
            self._queue.leave(request)
            prefill = self.table.get(choice.prefill) if choice.prefill else None
            self._tell(request, Placed(choice.decode, prefill.place if prefill else None))
            views.renew(choice.decode, choice.prefill)
        elif choice.kind == "nobody":
            self._tell(request, GivenUp("no_capacity", choice.reason))
        elif request not in self._queue:
            self._enqueue(request, choice.reason)

    def _enqueue(self, request: Request, reason: str) -> None:
        if len(self._queue) >= self._queue_limit:
            self._tell(request, GivenUp("queue_full", f"{reason} and {len(self._queue)} requests wait already"))
            return
        request.tried = frozenset()
        self._queue.join(request)

    def _place_soon(self) -> None:
        """One pass for all that happens in one turn of the loop."""
        if self._queue and not self._pass_due:
            self._pass_due = True
            asyncio.get_running_loop().call_soon(self._place_if_due)

    def _place_if_due(self) -> None:
        if self._pass_due:
            self._place_waiting()

    def _place_waiting(self) -> None:
        """Each that fits, in order; one that doesn't fit doesn't hold up the others."""
        self._pass_due = False
        views = Views(self.table)
        for request in self._queue.in_order():
            if not has_room(views.decodes):
                return
            if request not in self._queue:
                continue  # it ended with another
            num_placed = request.life.generation
            self._place(request, views)
            if request.life.generation > num_placed + 1:  # sent back and placed elsewhere
                views = Views(self.table)

    # ---- one request's events and commands

    def _tell(self, request: Request, event: Event) -> None:
        """Whatever goes wrong on the way costs this request alone."""
        try:
            for command in self._commands(request, event):
                self._do(request, command)
        except Exception:
            self._abandon(request, type(event).__name__)

    def _commands(self, request: Request, event: Event) -> list[LifeCommand]:
        try:
            return request.life.handle(event)
        except IllegalTransition as error:
            log.error("%s", error)
            return request.life.handle(GivenUp("internal", f"a worker broke the protocol: {type(event).__name__} out of turn"))

    def _abandon(self, request: Request, at: str) -> None:
        """Of an exception: the request ends, wherever it was, its workers hear of it, and what came before is logged."""
        life = request.life
        log.exception("%s: %s went wrong; before: %s", life.name, at, "; ".join(life.story))
        for worker in [worker for worker in self.table if life.request_id in worker.requests]:
            try:
                self._do(request, SendCancel(worker.epoch))
            except Exception:
                log.exception("%s: can't be cancelled at %s", life.name, worker.worker_id)
        if life.state is not State.ENDED:
            life.handle(GivenUp("internal", BROKEN))  # what it asks for is being done here
        self._end(request, Ending("failed", code="internal", message=BROKEN))

    def _do(self, request: Request, command: LifeCommand) -> None:
        match command:
            case Deliver():
                self._deliver(request, command)
            case SendAdmit():
                self._send_admit(request, command)
            case SendPrefill():
                self._send_prefill(request, command)
            case SparePrefill():
                spared = self.table.get(command.epoch)
                if spared is not None:
                    spared.requests.pop(request.order.request_id, None)
            case SendCancel():
                worker = self.table.get(command.to)
                if worker is not None:
                    key = request.life
                    self.members.send(
                        worker, Cancel(epoch=self.epoch, request_id=key.request_id, generation=key.generation, keep=command.keep)
                    )
            case Unpair():
                self._unpair(request, command)
            case Requeue():
                self._requeue(request, command)
            case End():
                self._end(request, command.ending)

    def _deliver(self, request: Request, command: Deliver) -> None:
        message = command.tokens
        if not request.first_token_at:
            now = request.first_token_at = self._clock()
            request.timing = message.timing
            self._metrics.observe_first_token(now - request.arrived_at, request.admitted_at - request.arrived_at, message.timing)
        if message.index == 0:
            self._metrics.cached_tokens += message.cached_tokens or 0
            request.sink.on_begin(message.cached_tokens or 0)
        self._metrics.generation_tokens += len(message.token_ids)
        try:
            matched = request.sink.on_tokens(message.token_ids, message.logprobs)
        except Exception:  # the edge between a worker's words and our code: it must not cost other requests their messages
            log.exception("%s: can't use %s", request.life.name, message)
            self._tell(request, GivenUp("internal", "the router can't use what the worker sent"))
            return
        if matched:
            self._tell(request, StopMatched())

    def _send_admit(self, request: Request, command: SendAdmit) -> None:
        worker = self.table.get(command.to)
        assert worker is not None, "placement chose a worker that isn't there"
        order, life = request.order, request.life
        worker.requests[order.request_id] = order.num_tokens
        prefill = self.table.get(command.prefill.epoch) if command.prefill else None
        if prefill is not None:
            prefill.requests[order.request_id] = max(0, len(order.token_ids) - prefill.held.num_tokens(order.chain))
        admit = Admit(
            epoch=self.epoch,
            request_id=order.request_id,
            generation=life.generation,
            token_ids=order.token_ids,
            sampling=order.sampling,
            prefill=command.prefill,
            local_tokens=self._local_tail_tokens,
            cache=order.cache,
        )
        if not self.members.send(worker, admit):
            self._tell(request, Undelivered(worker.epoch))

    def _send_prefill(self, request: Request, command: SendPrefill) -> None:
        worker = self.table.get(command.to)
        assert worker is not None, "a lost worker's requests have ended"
        order = request.order
        prefill = Prefill(
            epoch=self.epoch,
            request_id=order.request_id,
            generation=request.life.generation,
            token_ids=order.token_ids[:-1],
            decode_epoch=command.decode,
            cache=order.cache,
        )
        worker.held.note(order.chain)
        self.members.send(worker, prefill)

    def _unpair(self, request: Request, command: Unpair) -> None:
        request.refused_pairs |= {(command.decode, command.prefill)}  # once is enough, whatever D reports until then
        decode, prefill = self.table.get(command.decode), self.table.get(command.prefill)
        if decode is not None and prefill is not None:
            log.warning("%s isn't paired with %s any more: %s", decode.worker_id, prefill.worker_id, command.reason)
            self.table.note_refused_pair(decode, command.prefill, command.reason)

    def _requeue(self, request: Request, command: Requeue) -> None:
        worker = self.table.get(command.declined)
        if worker is not None and command.why == "draining":
            worker.draining = True
        elif worker is not None and command.why == "busy":
            size = request.order.num_tokens
            worker.refused_tokens = size if worker.refused_tokens is None else min(size, worker.refused_tokens)
        self._unbook(request)
        if command.why in ("busy", "draining"):
            request.tried |= {command.declined}
        self._place(request, Views(self.table))

    def _end(self, request: Request, ending: Ending) -> None:
        if self._requests.pop(request.order.request_id, None) is None:
            return  # abandoned meanwhile
        self._queue.leave(request)
        had_it = self._unbook(request)
        for worker in had_it:
            worker.refused_tokens = None
        if had_it:
            self._place_soon()
        try:
            self._tell_ending(request, ending)
        finally:
            self._count(request, ending)

    def _tell_ending(self, request: Request, ending: Ending) -> None:
        if ending.kind == "finished":
            ending = replace(ending, timings=request.timings(ending.finished, self._clock()))
        try:
            request.sink.on_end(ending)
        except Exception:  # as in _deliver; what is left to say then is that it failed
            log.exception("%s: can't tell its ending", request.life.name)
            request.sink.on_end(Ending("failed", code="internal", message="the router can't tell the ending"))

    def _unbook(self, request: Request) -> list[Worker]:
        """The workers that had it."""
        request_id = request.order.request_id
        return [worker for worker in self.table if worker.requests.pop(request_id, None) is not None]

    def _count(self, request: Request, ending: Ending) -> None:
        metrics = self._metrics
        metrics.endings["_".join(part for part in (ending.kind, ending.reason or ending.code) if part)] += 1
        if ending.finished is not None:
            metrics.proposed_drafts += ending.finished.proposed_drafts
            metrics.accepted_drafts += ending.finished.accepted_drafts
        if ending.kind == "finished":
            now = self._clock()
            total_s = now - request.arrived_at
            metrics.observe_finished(total_s, now - request.first_token_at, request.life.num_tokens)
            self._mean_request_s += 0.1 * (total_s - self._mean_request_s)
        elif ending.kind == "failed" and ending.code not in ("queue_full", "no_capacity", "stopping"):
            log.warning("%s failed: %s: %s", request.life.name, ending.code, ending.message)

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
            if not request.admitted_at:  # else it was sent back since
                self._metrics.prompt_tokens += len(request.order.token_ids)
            request.admitted_at = self._clock()
            self._note_admitted(request, message)
        elif isinstance(message, PrefillDone):
            self._note_prefill_done(message)
        if self._stopping and isinstance(message, Cancelled):  # whoever stops us stops the workers too
            self._tell(request, GivenUp("stopping", STOPPING))
        else:
            self._tell(request, message)

    def _note_admitted(self, request: Request, message: Admitted) -> None:
        worker = self.table.get(message.epoch)
        if worker is not None:
            worker.held.note(request.order.chain)

    def _note_prefill_done(self, message: PrefillDone) -> None:
        worker = self.table.get(message.epoch)
        if worker is not None and message.request_id in worker.requests:
            worker.requests[message.request_id] = 0

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
            self._tell(oldest, DeadlinePassed())

    def _on_lost(self, worker: Worker, reason: str) -> None:
        for request_id in list(worker.requests):
            request = self._requests.get(request_id)
            if request is not None:  # one that ended may have taken others along
                leaving = self._stopping and reason == LEFT  # as in _on_request_message
                self._tell(request, GivenUp("stopping", STOPPING) if leaving else WorkerLost(worker.epoch, reason))
        self._flushes.on_lost(worker)
        self._place_soon()

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
