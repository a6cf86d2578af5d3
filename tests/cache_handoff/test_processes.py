"""The same through real processes: a router, workers and UCX between them, mixed prompts over shared beginnings, a tight budget, K = 3."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.make_checkpoint import make_checkpoint
from engine import Engine
from protocol.sampling import SamplingParams
from tests.system.cluster_kit import Cluster, stream_to_end

NEW_TOKENS = 10
NUM_PROMPTS, AT_ONCE = 40, 16
TIGHT = ("--step-tokens", "64", "--max-prefill-chunk", "32", "--snapshot-tokens", "32", "--max-running", str(AT_ONCE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(model, tmp_path_factory.mktemp("cluster"))
    cluster.start_router()
    cluster.start_worker("prefill", "p", *TIGHT)
    cluster.start_worker("decode", "d", "--speculation", "3", *TIGHT)
    cluster.until_ready(1, 1)
    yield cluster
    cluster.stop_all()


def make_prompts() -> list[list[int]]:
    """Trees of beginnings; some prompts are whole beginnings of others."""
    draw = random.Random(11)
    roots = [[draw.randrange(8, 1024) for _ in range(draw.choice((40, 96, 150)))] for _ in range(3)]
    prompts: list[list[int]] = []
    for _ in range(NUM_PROMPTS):
        base = draw.choice([*roots, *prompts[-8:]])
        prompts.append([*base[: draw.randint(1, len(base))], *(draw.randrange(8, 1024) for _ in range(draw.choice((1, 2, 7, 16, 33))))])
    return prompts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
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


async def test_cold_and_warm_with_and_without_are_the_same(cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with cluster.client() as client:
        without, none = await ask_all(client, prompts, cache_prompt=False)
        assert without == expected
        assert sum(none) == 0
        cold, hits = await ask_all(client, prompts)
        assert cold == expected
        assert sum(hits) > 0, "beginnings are shared"
        warm, full = await ask_all(client, prompts)
        assert warm == expected
        assert all(0 <= cached <= len(prompt) - 1 for cached, prompt in zip(full, prompts, strict=True))
        assert sum(full) > sum(hits)
        cluster.until_whole()
        for role in ("prefill", "decode"):
            assert await counter(client, "baton_state_audit_violations_total", role) == 0
            assert await counter(client, "baton_cache_lookups_total", role) > 0


async def test_who_holds_what_is_told_and_forgotten_on_demand(
    cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """One prompt held by nobody, both, P alone (D is replaced), and D alone, with P killed."""
    which = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    prompt, tokens = prompts[which], expected[which]
    async with cluster.client() as client:

        async def ask() -> int:
            told, (cached,) = await ask_all(client, [prompt])
            assert told == [tokens]
            return cached

        flushed = (await client.post("/flush_cache")).json()
        assert flushed["complete"] is True
        assert {worker["worker_id"] for worker in flushed["workers"]} == {"p", "d"}
        assert await ask() == 0
        assert await ask() == len(prompt) - 1
        assert cluster.stop("d") == 0
        cluster.start_worker("decode", "d", "--speculation", "3", *TIGHT)
        cluster.until_ready(1, 1)
        assert await ask() == len(prompt) - 1, "P's"
        cluster.stop("p", signal.SIGKILL)
        cluster.until_ready(0, 1)
        assert await ask() == len(prompt) - 1, "D's, and nobody else lives"
        assert (await client.post("/flush_cache")).json()["complete"] is True
        assert await ask() == 0
        cluster.until_whole()
