"""Work that nobody waits for: done between steps, in pieces that a step can bear."""

from __future__ import annotations

from typing import Protocol


class Background(Protocol):
    """Called on the engine's thread, between steps. Must not raise for what is wrong with its own work."""

    def has_work(self) -> bool: ...

    def work(self, *, busy: bool) -> None:
        """One piece. ``busy``: requests are waiting for the next step, so it should be small, or nothing."""
        ...
