"""What a client may know of its sequence's time and work: ``return_timings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.messages import Finished, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Of one finished sequence. Seconds, each part by the clock of the process that did the work."""

    router_s: float
    """Arrival until D had room."""
    parts: Timing | None
    """As D told them with the first token."""
    first_token_s: float
    """Arrival to first token."""
    total_s: float
    """Arrival to ending."""
    finished: Finished | None
    """D's own account; None when the router ended it, at a stop string."""

    def as_dict(self) -> dict[str, Any]:
        """Milliseconds and counts. null: nobody has said."""
        parts, finished = self.parts, self.finished
        return {
            "router_ms": _ms(self.router_s),
            "queue_ms": parts and _ms(parts.queue_s),
            "prefill_ms": parts and _ms(parts.prefill_s),
            "transfer_ms": parts and _ms(parts.transfer_s),
            "decode_wait_ms": parts and _ms(parts.decode_wait_s),
            "first_token_ms": _ms(self.first_token_s),
            "total_ms": _ms(self.total_s),
            "transfer_bytes": parts and parts.transfer_bytes,
            "steps": finished and finished.steps,
            "proposed_drafts": finished and finished.proposed_drafts,
            "accepted_drafts": finished and finished.accepted_drafts,
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
