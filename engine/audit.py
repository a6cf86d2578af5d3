"""What the audit found: every state that was claimed to be another one than it is, with the request's story.

Always on. Tags are compared wherever a state is published, sealed or gone on from (``StatePool.audit``; a comparison of two
numbers); what doesn't fit is refused there, and told here. ``engine.deep_audit`` compares the numbers themselves, for a sample.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

MAX_KEPT = 256
"""Violations that wait to be told; of more, the newest are kept. All are counted and logged."""

log = logging.getLogger("baton.audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    purpose: str
    """What the state was to be used for: publish, resume, seal, extend, verify, commit; recompute for the deep audit's."""
    request_id: str
    step: int
    claimed: int
    """Position."""
    held: int | None
    """The position that the state truly holds. None: none that is known."""
    story: str
    """The request's last events."""
    detail: str = ""

    def __str__(self) -> str:
        held = f"state@{self.held}" if self.held is not None else "another state"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.purpose}: hashed as state@{self.claimed} but holds {held}{detail}; request {self.request_id}, step {self.step}"


class AuditLog:
    def __init__(self) -> None:
        self.total = 0
        self._untold: deque[Violation] = deque(maxlen=MAX_KEPT)

    def record(self, violation: Violation) -> None:
        self.total += 1
        self._untold.append(violation)
        log.error("%s; story: %s", violation, violation.story)

    def take(self) -> list[Violation]:
        """Those since the last call."""
        taken = list(self._untold)
        self._untold.clear()
        return taken
