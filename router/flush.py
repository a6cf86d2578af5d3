"""Emptying the prefix caches of all workers, for ``POST /flush_cache``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.ids import Epoch
from protocol.messages import CacheFlushed, FlushCache
from router.membership import Membership
from router.workers import Worker

PATIENCE_S = 10.0
"""A worker answers between two of its steps."""


@dataclass(slots=True)
class Flushed:
    """What became of one flush."""

    answers: list[tuple[Worker, CacheFlushed]] = field(default_factory=list)
    silent: list[Worker] = field(default_factory=list)
    """They didn't answer in time, or have left since."""


@dataclass(slots=True)
class _Round:
    waiting: set[Epoch]
    answers: dict[Epoch, CacheFlushed] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, epoch: Epoch) -> None:
        self.waiting.discard(epoch)
        if not self.waiting:
            self.complete.set()


class CacheFlushes:
    """Asks all workers and collects what they say. Several rounds may be under way."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._rounds: dict[int, _Round] = {}
        self._numbers = itertools.count(1)

    async def flush(self, workers: Sequence[Worker], timeout_s: float = PATIENCE_S) -> Flushed:
        number = next(self._numbers)
        one = self._rounds[number] = _Round({worker.epoch for worker in workers})
        try:
            for worker in workers:
                worker.held.clear()
                if not self._members.send(worker, FlushCache(epoch=self._members.epoch, number=number)):
                    one.settle(worker.epoch)
            if workers:
                async with asyncio.timeout(timeout_s):
                    await one.complete.wait()
        except TimeoutError:
            pass  # told by who isn't among the answers
        finally:
            del self._rounds[number]
        return Flushed(
            answers=[(worker, one.answers[worker.epoch]) for worker in workers if worker.epoch in one.answers],
            silent=[worker for worker in workers if worker.epoch not in one.answers],
        )

    def on_flushed(self, message: CacheFlushed) -> None:
        """Late answers are nobody's any more."""
        one = self._rounds.get(message.number)
        if one is not None and message.epoch in one.waiting:
            one.answers[message.epoch] = message
            one.settle(message.epoch)

    def on_lost(self, worker: Worker) -> None:
        for one in self._rounds.values():
            one.settle(worker.epoch)
