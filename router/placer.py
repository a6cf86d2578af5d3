"""Requests that look for workers: placed at once, waiting in line, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.events import Event, GivenUp, Placed
from router.placement import Needs, NoPlace, has_room, place
from router.request import Request
from router.waiting import WaitingLine
from router.workers import Views, WorkerTable


class Placer:
    """``tell``: the request's life hears what became of it. ``abandon``: it ends for what went wrong on our side."""

    def __init__(
        self,
        table: WorkerTable,
        queue: WaitingLine,
        *,
        queue_limit: int,
        local_prefill_tokens: int,
        tell: Callable[[Request, Event], None],
        abandon: Callable[[Request, str], None],
    ) -> None:
        self._table = table
        self._queue = queue
        self._queue_limit = queue_limit
        self._local_prefill_tokens = local_prefill_tokens
        self._tell = tell
        self._abandon = abandon
        self._pass_due = False

    def place_new(self, request: Request) -> None:
        """Those that wait come first."""
        self._place_if_due()
        self.place(request)

    def place(self, request: Request, views: Views | None = None) -> None:
        """On a worker, into the queue, or to its end. The views are up to date afterwards, if it got where it was to go."""
        try:
            self._try_place(request, Views(self._table) if views is None else views)
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
            held={worker.epoch: worker.held.num_tokens(order.chain) for worker in self._table} if order.chain else {},
        )
        choice = place(views.prefills, views.decodes, needs)
        if not isinstance(choice, NoPlace):
            self._queue.leave(request)
            prefill = self._table.get(choice.prefill) if choice.prefill else None
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

    def place_soon(self) -> None:
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
        views = Views(self._table)
        for request in self._queue.in_order():
            if not has_room(views.decodes):
                return
            if request not in self._queue:
                continue  # it ended with another
            num_placed = request.life.generation
            self.place(request, views)
            if request.life.generation > num_placed + 1:  # sent back and placed elsewhere
                views = Views(self._table)
