"""Clients that leave at every stage: all pages come back on both sides, and the cluster works on."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httpx

from tests.system.cluster_kit import PATIENCE_S, Cluster, complete, stream
from tests.system.conftest import Alone

NUM_REQUESTS = 200
AT_ONCE = 24


async def test_200_clients_that_leave_at_random_stages(cluster: Cluster, alone: Alone) -> None:
    cluster.use_speculation(3)
    draw = random.Random(7)
    seats = asyncio.Semaphore(AT_ONCE)
    stages = {"before the first token": 0, "while it streams": 0}

    async def one(client: httpx.AsyncClient) -> None:
        prompt = [draw.randrange(8, 1024) for _ in range(draw.choice((1, 2, 5, 30, 100, 400)))]
        enough = draw.choice((1, 2, 40))
        patience_s = draw.choice((0.0, 0.005, 0.02, 0.1)) * draw.random() if draw.random() < 0.6 else PATIENCE_S
        async with seats:
            num_tokens = 0
            try:
                async with (
                    asyncio.timeout(patience_s),
                    contextlib.aclosing(stream(client, prompt, max_tokens=500, ignore_eos=True)) as answers,
                ):
                    async for answer in answers:
                        assert answer.error is None
                        num_tokens = len(answer.token_ids)
                        if num_tokens >= enough:
                            break
            except TimeoutError:
                pass
        stages["while it streams" if num_tokens else "before the first token"] += 1

    async with cluster.client() as client:
        await asyncio.gather(*(one(client) for _ in range(NUM_REQUESTS)))
        assert all(stages.values()), stages
        cluster.until_whole()
        choice = await complete(client, [9] * 50, max_tokens=8, ignore_eos=True)
    assert [choice["token_ids"]] == alone([[9] * 50], max_tokens=8, ignore_eos=True)
    cluster.until_whole()
