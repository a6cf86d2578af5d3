"""What the workers' audits have found: states that were claimed to be other ones than they are."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from protocol.messages import AuditFound
from router.workers import Worker

MAX_KEPT = 1000
"""The newest are kept; all are counted."""
VIOLATIONS = "baton_state_audit_violations_total"
DEEP = ("passed", "failed", "skipped", "errors")
DIFFERENCE = "baton_deep_audit_largest_difference"

log = logging.getLogger("baton.router")


class AuditBook:
    """Kept as long as the router lives, though the worker may be gone."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.total = 0
        self.entries: deque[dict[str, Any]] = deque(maxlen=max_kept)

    def note(self, worker: Worker, found: AuditFound) -> None:
        self.total += 1
        entry = {"worker_id": worker.worker_id, "role": worker.hello.role, "at": round(time.time(), 3)}
        self.entries.append(entry | found.model_dump(exclude={"type", "epoch"}))
        log.error("%s: %s: hashed as state@%d but holds state@%s; request %s", worker.worker_id, found.purpose, found.claimed,
                  "?" if found.held is None else found.held, found.request_id)  # fmt: skip


def report(book: AuditBook, workers: Iterable[Worker]) -> dict[str, Any]:
    """``violations``: told to this router. A worker's own count also has those from before the router started."""
    return {"violations": book.total, "workers": [_told(worker) for worker in workers], "entries": list(book.entries)}


def _told(worker: Worker) -> dict[str, Any]:
    counters = worker.counters
    return {
        "worker_id": worker.worker_id,
        "role": worker.hello.role,
        "violations": int(counters.get(VIOLATIONS, 0)),
        "published": int(counters.get("baton_cache_published_snapshots_total", 0)),
        "hits": int(counters.get("baton_cache_hits_total", 0)),
        "deep": {key: int(counters.get(f"baton_deep_audit_{key}_total", 0)) for key in DEEP},
        "largest_difference": counters.get(DIFFERENCE, 0.0),
    }
