"""Mixed prompts over shared beginnings, what a plain process makes of them, and how to ask a server for all of them at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from engine import Engine
from protocol.sampling import SamplingParams
from tests.system.cluster_kit import stream_to_end

NEW_TOKENS = 10
NUM_PROMPTS, AT_ONCE = 40, 16


def make_prompts() -> list[list[int]]:
    """Trees of beginnings; some prompts are whole beginnings of others."""
    draw = random.Random(11)
    roots = [[draw.randrange(8, 1024) for _ in range(draw.choice((40, 96, 150)))] for _ in range(3)]
    prompts: list[list[int]] = []
    for _ in range(NUM_PROMPTS):
        base = draw.choice([*roots, *prompts[-8:]])
        prompts.append([*base[: draw.randint(1, len(base))], *(draw.randrange(8, 1024) for _ in range(draw.choice((1, 2, 7, 16, 33))))])
    return prompts


def alone(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """One process, no speculation, no cache."""
    engine = Engine(model, threads=1, prefix_cache=False)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(done.token_ids) for done in engine.generate(prompts, params)]


async def ask_all(client: httpx.AsyncClient, prompts: Sequence[list[int]], **fields: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of each, so many at once."""
    seats = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> tuple[list[int], int]:
        async with seats:
            options = {"include_usage": True}
            answer = await stream_to_end(client, prompt, max_tokens=NEW_TOKENS, ignore_eos=True, stream_options=options, **fields)
        assert answer.error is None
        assert answer.usage is not None
        return answer.token_ids, answer.usage["prompt_tokens_details"]["cached_tokens"]

    told = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return [tokens for tokens, _ in told], [cached for _, cached in told]


async def counter(client: httpx.AsyncClient, name: str, role: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and f'role="{role}"' in line)
