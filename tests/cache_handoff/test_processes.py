"""The same through real processes: a router, workers and UCX between them, mixed prompts over shared beginnings, a tight budget, K = 3."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache_handoff.load_kit import AT_ONCE, ask_all, counter
from tests.system.cluster_kit import Cluster

TIGHT = ("--step-tokens", "64", "--max-prefill-chunk", "32", "--snapshot-tokens", "32", "--max-running", str(AT_ONCE))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(model, tmp_path_factory.mktemp("cluster"))
    cluster.start_router()
    cluster.start_worker("prefill", "p", *TIGHT)
    cluster.start_worker("decode", "d", "--speculation", "3", *TIGHT)
    cluster.until_ready(1, 1)
    yield cluster
    cluster.stop_all()


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
