"""Drives requests' lives: an event goes in, and what the life commands is done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from protocol.errors import IllegalTransition
from protocol.ids import RequestId
from router.accounts import Accounts
from router.booking import Booking
from router.events import (
    Command,
    Deliver,
    End,
    Ending,
    Event,
    GivenUp,
    Requeue,
    SendAdmit,
    SendCancel,
    SendPrefill,
    SparePrefill,
    StopMatched,
    Undelivered,
    Unpair,
)
from router.lifecycle import State
from router.placer import Placer
from router.request import Request
from router.waiting import WaitingLine
from router.workers import WorkerTable

BROKEN = "the router failed at this request"

log = logging.getLogger("baton.router")


class Lives:
    """Whatever goes wrong with a request costs this request alone."""

    def __init__(
        self,
        requests: dict[RequestId, Request],
        queue: WaitingLine,
        table: WorkerTable,
        booking: Booking,
        accounts: Accounts,
        *,
        queue_limit: int,
        local_prefill_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """A request leaves ``requests`` and ``queue`` when it ends."""
        self._requests = requests
        self._queue = queue
        self._booking = booking
        self._accounts = accounts
        self._clock = clock
        self.placer = Placer(
            table, queue, queue_limit=queue_limit, local_prefill_tokens=local_prefill_tokens, tell=self.tell, abandon=self._abandon
        )

    def tell(self, request: Request, event: Event) -> None:
        try:
            for command in self._commands(request, event):
                self._do(request, command)
        except Exception:
            self._abandon(request, type(event).__name__)

    def _commands(self, request: Request, event: Event) -> list[Command]:
        try:
            return request.life.handle(event)
        except IllegalTransition as error:
            log.error("%s", error)
            return request.life.handle(GivenUp("internal", f"a worker broke the protocol: {type(event).__name__} out of turn"))

    def _abandon(self, request: Request, at: str) -> None:
        """Of an exception: the request ends, wherever it was, its workers hear of it, and what came before is logged."""
        life = request.life
        log.exception("%s: %s went wrong; before: %s", life.name, at, "; ".join(life.story))
        for worker in self._booking.holders(request):
            try:
                self._do(request, SendCancel(worker.epoch))
            except Exception:
                log.exception("%s: can't be cancelled at %s", life.name, worker.worker_id)
        if life.state is not State.ENDED:
            life.handle(GivenUp("internal", BROKEN))  # what it asks for is being done here
        self._end(request, Ending("failed", code="internal", message=BROKEN))

    def _do(self, request: Request, command: Command) -> None:
        booking = self._booking
        match command:
            case Deliver():
                self._deliver(request, command)
            case SendAdmit():
                if not booking.admit(request, command):
                    self.tell(request, Undelivered(command.to))
            case SendPrefill():
                booking.prefill(request, command)
            case SparePrefill():
                booking.spare_prefill(request, command)
            case SendCancel():
                booking.cancel(request, command)
            case Unpair():
                booking.unpair(request, command)
            case Requeue():
                booking.note_declined(request, command)
                booking.release(request)
                self.placer.place(request)
            case End():
                self._end(request, command.ending)

    def _deliver(self, request: Request, command: Deliver) -> None:
        message = command.tokens
        self._accounts.delivered(request, message)
        if message.index == 0:
            request.sink.on_begin(message.cached_tokens or 0)
        try:
            matched = request.sink.on_tokens(message.token_ids, message.logprobs)
        except Exception:  # the edge between a worker's words and our code: it must not cost other requests their messages
            log.exception("%s: can't use %s", request.life.name, message)
            self.tell(request, GivenUp("internal", "the router can't use what the worker sent"))
            return
        if matched:
            self.tell(request, StopMatched())

    def _end(self, request: Request, ending: Ending) -> None:
        if self._requests.pop(request.order.request_id, None) is None:
            return  # abandoned meanwhile
        self._queue.leave(request)
        had_it = self._booking.release(request)
        for worker in had_it:
            worker.refused_tokens = None
        if had_it:
            self.placer.place_soon()
        try:
            self._tell_ending(request, ending)
        finally:
            self._accounts.ended(request, ending)

    def _tell_ending(self, request: Request, ending: Ending) -> None:
        if ending.kind == "finished":
            ending = replace(ending, timings=request.timings(ending.finished, self._clock()))
        try:
            request.sink.on_end(ending)
        except Exception:  # as in _deliver; what is left to say then is that it failed
            log.exception("%s: can't tell its ending", request.life.name)
            request.sink.on_end(Ending("failed", code="internal", message="the router can't tell the ending"))
