"""What ``GET /audit`` of a Baton answers, as far as we read it. More fields than these are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class Recomputed(_Part):
    """Hits by what became of their second computation."""

    passed: Count
    failed: Count
    skipped: Count
    errors: Count


class WorkerAudit(_Part):
    """One worker's counts since it started."""

    worker_id: str
    violations: Count
    published: Count
    hits: Count
    deep: Recomputed
    largest_difference: float


class Entry(_Part):
    """One violation."""

    worker_id: str
    at: Annotated[float, Field(ge=0, lt=1 << 37)]
    """Seconds since 1970."""
    purpose: str
    request_id: str
    step: int
    claimed: int
    held: int | None
    detail: str
    story: str

    @property
    def told(self) -> str:
        held = "?" if self.held is None else self.held
        return f"{self.purpose}: hashed as state@{self.claimed} but holds state@{held}"


class AuditReport(_Part):
    violations: Count
    """Told to this router. A worker's own count also has those from before the router started."""
    workers: list[WorkerAudit]
    entries: list[Entry]

    @property
    def found(self) -> int:
        """Violations, by whichever count has more: the workers' come with heartbeats, the router's are of its time alone."""
        return max(self.violations, sum(worker.violations for worker in self.workers))
