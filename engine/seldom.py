"""Warnings that may come by the thousand, one for each file of a bad disk: a line a minute says how many there were."""

from __future__ import annotations

import logging
import time
from collections import Counter

EVERY_S = 60.0


class Seldom:
    """Any thread may warn: at worst a line is one too many."""

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._quiet_until: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def warning(self, kind: str, message: str) -> None:
        """``kind``: of these only one is told in ``every_s`` seconds."""
        now = time.monotonic()
        if now < self._quiet_until.get(kind, now):
            self._untold[kind] += 1
            return
        self._quiet_until[kind] = now + self._every_s
        untold = self._untold.pop(kind, 0)
        self._log.warning("%s%s", message, f" (and {untold} like it before)" if untold else "")
