"""Every request that was taken, until it ends; and what is counted on the way."""

from __future__ import annotations

import logging
from collections import Counter

from engine.active import ActiveRequest
from engine.audit import AuditLog, Violation
from engine.request import FailedEvent
from engine.scheduler import Scheduler
from protocol.errors import StateAuditError
from protocol.ids import RequestKey

log = logging.getLogger(__name__)

COUNTERS = (
    "baton_steps_total",
    "baton_prompt_tokens_total",
    "baton_output_tokens_total",
    "baton_proposed_drafts_total",
    "baton_accepted_drafts_total",
    "baton_draft_failures_total",
    "baton_failed_requests_total",
)


class Book:
    def __init__(self, scheduler: Scheduler, audit: AuditLog) -> None:
        self._scheduler = scheduler
        self._audit = audit
        self.requests: dict[RequestKey, ActiveRequest] = {}
        self.arrivals = 0
        self.stalled = False
        """All that is there waits for something from outside."""
        self.counts = Counter[str]()
        """By the names of COUNTERS."""

    def enter(self, active: ActiveRequest) -> None:
        """The scheduler has taken it."""
        self.arrivals += 1
        self.requests[active.key] = active
        self.stalled = False
        active.tell(f"{active.request.origin}, {active.num_prompt} tokens")

    def forget(self, active: ActiveRequest) -> None:
        """It has ended; its pages are free."""
        self._scheduler.roster.drop(active)
        del self.requests[active.key]
        self.stalled = False

    def fail(self, active: ActiveRequest, error: Exception) -> FailedEvent:
        """End it for what went wrong with it."""
        if isinstance(error, StateAuditError):
            self._audit.record(_violation(error, active, self._scheduler.steps))
        self.counts["baton_failed_requests_total"] += 1
        log.error("request failed: %s: %s; story: %s", type(error).__name__, error, active.told())
        if active.seals:
            self._scheduler.hold(active)  # a peer may be reading its blocks: not ours to free (invariant 9)
        else:
            self.forget(active)
        return FailedEvent(key=active.key, message=f"{type(error).__name__}: {error}")

    def counters(self) -> dict[str, float]:
        return {name: float(self.counts[name]) for name in COUNTERS}

    def check_integrity(self) -> None:
        """Raises AssertionError when the scheduler has other requests than these."""
        held = {active.key for active in self._scheduler.roster.requests()}
        assert held == self.requests.keys(), f"known {self.requests.keys()}, scheduled {held}"


def _violation(error: StateAuditError, active: ActiveRequest, step: int) -> Violation:
    return Violation(
        purpose=error.purpose, request_id=active.key.request_id, step=step, claimed=error.claimed, held=error.held, story=active.told()
    )
