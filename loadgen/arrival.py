"""When sessions begin: as soon as another has ended (closed), or by themselves (Poisson)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from random import Random

Job = Callable[[], Awaitable[None]]


async def run_closed(jobs: Iterable[Job], concurrency: int) -> None:
    """``concurrency`` at once until there are no more."""
    waiting = iter(jobs)

    async def one_after_another() -> None:
        for job in waiting:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())


async def run_poisson(jobs: Iterable[Job], rate: float, seed: int) -> None:
    """``rate`` begin per second on average, however many are running."""
    random, loop = Random(seed), asyncio.get_running_loop()
    next_at = loop.time()
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            await asyncio.sleep(next_at - loop.time())
            group.create_task(_run(job))
            next_at += random.expovariate(rate)


async def _run(job: Job) -> None:
    await job()
