"""What requests' ways leave in the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable

from protocol.messages import Tokens
from router.events import Ending
from router.metrics import Metrics
from router.request import Request

log = logging.getLogger("baton.router")


class Accounts:
    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self.mean_request_s = 1.0

    def admitted(self, request: Request) -> None:
        if not request.admitted_at:  # else it was sent back since
            self._metrics.prompt_tokens += len(request.order.token_ids)
        request.admitted_at = self._clock()

    def delivered(self, request: Request, message: Tokens) -> None:
        metrics = self._metrics
        if not request.first_token_at:
            now = request.first_token_at = self._clock()
            request.timing = message.timing
            metrics.observe_first_token(now - request.arrived_at, request.admitted_at - request.arrived_at, message.timing)
        if message.index == 0:
            metrics.cached_tokens += message.cached_tokens or 0
        metrics.generation_tokens += len(message.token_ids)

    def ended(self, request: Request, ending: Ending) -> None:
        metrics = self._metrics
        metrics.endings["_".join(part for part in (ending.kind, ending.reason or ending.code) if part)] += 1
        if ending.finished is not None:
            metrics.proposed_drafts += ending.finished.proposed_drafts
            metrics.accepted_drafts += ending.finished.accepted_drafts
        if ending.kind == "finished":
            now = self._clock()
            total_s = now - request.arrived_at
            metrics.observe_finished(total_s, now - request.first_token_at, request.life.num_tokens)
            self.mean_request_s += 0.1 * (total_s - self.mean_request_s)
        elif ending.kind == "failed" and ending.code not in ("queue_full", "no_capacity", "stopping"):
            log.warning("%s failed: %s: %s", request.life.name, ending.code, ending.message)
