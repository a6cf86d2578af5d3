"""P's promises: how long a hand-off is kept for a peer that doesn't come. The clock is passed in; nobody sleeps here.

An ended lease frees nothing by itself. It only makes the hand-off's lifecycle end, and that one waits for its sends.
"""

from __future__ import annotations

from protocol.ids import RequestKey


class Leases:
    """Deadlines by request, in seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._deadlines: dict[RequestKey, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, key: RequestKey, now: float, seconds: float) -> None:
        """A new lease, or a longer one: a lease never gets shorter."""
        self._deadlines[key] = max(now + seconds, self._deadlines.get(key, now))

    def end(self, key: RequestKey) -> None:
        """The lease isn't needed any more. Unknown ones are fine: it may have run out in the same breath."""
        self._deadlines.pop(key, None)

    def take_ended(self, now: float) -> list[RequestKey]:
        """All leases past their deadline, each told exactly once."""
        ended = [key for key, deadline in self._deadlines.items() if deadline <= now]
        for key in ended:
            del self._deadlines[key]
        return ended

    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)
