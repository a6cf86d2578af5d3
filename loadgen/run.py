"""A whole run: many sessions against one server, and all that is known about them whenever somebody asks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.arrival import Job, run_closed, run_poisson
from loadgen.record import Session, Turn

Work = Callable[[Session, float], Awaitable[None]]
"""Fills the session; the second argument is when the run began."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """``rate`` None: closed, ``concurrency`` at once. Else Poisson with ``rate`` sessions per second."""

    concurrency: int = 8
    rate: float | None = None
    seed: int = 0

    def described(self) -> dict[str, Any]:
        """For the report."""
        kind = "closed" if self.rate is None else "poisson"
        return {"arrival": kind, "rate": self.rate, "concurrency": self.concurrency, "seed": self.seed}


@dataclass(slots=True)
class Run:
    """``sessions`` are those that ended, in that order; what was under way when a run was stopped is left out."""

    sessions: list[Session] = field(default_factory=list)
    began_at: float = 0.0
    duration_s: float = 0.0

    @property
    def turns(self) -> list[Turn]:
        return [turn for session in self.sessions for turn in session.turns]

    async def go(self, work: Sequence[tuple[Session, Work]], arrival: Arrival, on_end: Callable[[Session], None] = lambda _: None) -> None:
        self.began_at = time.monotonic()
        try:
            jobs = self._jobs(work, on_end)
            if arrival.rate is None:
                await run_closed(jobs, arrival.concurrency)
            else:
                await run_poisson(jobs, arrival.rate, arrival.seed)
        finally:
            self.duration_s = time.monotonic() - self.began_at

    def _jobs(self, work: Sequence[tuple[Session, Work]], on_end: Callable[[Session], None]) -> Iterable[Job]:
        for session, fill in work:
            yield lambda session=session, fill=fill: self._one(session, fill, on_end)  # type: ignore[misc]

    async def _one(self, session: Session, fill: Work, on_end: Callable[[Session], None]) -> None:
        await fill(session, self.began_at)
        self.sessions.append(session)
        on_end(session)
