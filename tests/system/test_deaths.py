"""Workers killed in the middle of requests: their clients hear of it in time, the others notice nothing, a new life is welcome."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.cluster_kit import Answer, Cluster, Stopwatch, complete, complete_later, stream, until
from tests.system.conftest import Alone

HEARD_WITHIN_S = 2.0
LONG_PROMPT = [11 + i % 900 for i in range(3500)]
LONG_ANSWER = 3500
"""Nobody waits for the end of either."""


@pytest.fixture(scope="module")
def survivors(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(model, tmp_path_factory.mktemp("four"))
    yield cluster
    cluster.stop_all()


def revive(cluster: Cluster) -> Cluster:
    """Whoever died in the test before is started again, under the old name."""
    dead = {"router", "p0", "p1", "d0", "d1"} - cluster.processes.keys()
    if "router" in dead:
        cluster.start_router()
    for name in sorted(dead - {"router"}):
        if name.startswith("p"):
            cluster.start_worker("prefill", name, "--max-prefill-chunk", "16", "--step-tokens", "16", "--no-prefix-cache")
        else:
            cluster.start_worker("decode", name, "--speculation", "2", "--no-prefix-cache")
    cluster.until_ready(2, 2)
    cluster.until_whole()
    return cluster


@pytest.fixture
def four(survivors: Cluster) -> Cluster:
    """Two prefill and two decode workers."""
    return revive(survivors)


@pytest.fixture
def three(survivors: Cluster) -> Cluster:
    """Two decode workers and at least one prefill worker: it may be that one has just died."""
    return survivors if {"router", "d0", "d1"} < survivors.processes.keys() else revive(survivors)


@pytest.fixture
def watch() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    yield watch
    watch.stop()


class Watched:
    """A streamed answer, and when it ended."""

    def __init__(self, watch: Stopwatch) -> None:
        self.answer = Answer()
        self.first = asyncio.Event()
        self.ended_at = 0.0
        self._watch = watch

    async def run(self, client: httpx.AsyncClient, prompt: list[int], **params: Any) -> None:
        async for self.answer in stream(client, prompt, **params):
            if self.answer.token_ids:
                self.first.set()
        self.ended_at = self._watch.seconds


def is_at(cluster: Cluster, role: str, *, idle: bool = False) -> str | None:
    """The worker of this role that has a request, or one that has none."""
    found = [worker["worker_id"] for worker in cluster.workers() if worker["role"] == role and (worker["requests"] == 0) == idle]
    return found[0] if found else None


async def until_at(cluster: Cluster, role: str) -> str:
    name = await until(lambda: is_at(cluster, role))
    assert name is not None
    return name


async def test_a_prefill_worker_dies_while_it_computes(four: Cluster, alone: Alone, watch: Stopwatch) -> None:
    victim = Watched(watch)
    async with four.client() as client:
        running = asyncio.create_task(victim.run(client, LONG_PROMPT, max_tokens=5))
        name = await until_at(four, "prefill")
        killed_at = watch.seconds
        assert four.stop(name, signal.SIGKILL) == -signal.SIGKILL
        choice = await complete(client, [21] * 40, max_tokens=8, ignore_eos=True)
        await running
    assert victim.answer.error is not None, victim.answer
    assert victim.answer.finish_reason is None, "a fake finish"
    assert not victim.answer.token_ids
    assert victim.ended_at - killed_at < HEARD_WITHIN_S
    assert [choice["token_ids"]] == alone([[21] * 40], max_tokens=8, ignore_eos=True)


async def test_a_decode_worker_dies_while_it_streams(three: Cluster, alone: Alone, watch: Stopwatch) -> None:
    victim, bystander = Watched(watch), Watched(watch)
    async with three.client() as client:
        running = [asyncio.create_task(victim.run(client, [31] * 40, max_tokens=LONG_ANSWER, ignore_eos=True))]
        await victim.first.wait()
        name = is_at(three, "decode")
        assert name is not None
        running.append(asyncio.create_task(bystander.run(client, [5, 6, 7], max_tokens=700, ignore_eos=True)))
        await bystander.first.wait()
        killed_at = watch.seconds
        assert three.stop(name, signal.SIGKILL) == -signal.SIGKILL
        await asyncio.gather(*running)
        answers = await asyncio.gather(*(complete(client, [41 + i] * 20, max_tokens=6, ignore_eos=True) for i in range(8)))
    assert victim.answer.error is not None, victim.answer
    assert victim.answer.finish_reason is None, "a fake finish"
    assert 0 < len(victim.answer.token_ids) < LONG_ANSWER
    assert victim.ended_at - killed_at < HEARD_WITHIN_S
    assert bystander.answer.error is None
    assert bystander.answer.finish_reason == "length"
    assert [bystander.answer.token_ids] == alone([[5, 6, 7]], max_tokens=700, ignore_eos=True)
    assert [answer["token_ids"] for answer in answers] == alone([[41 + i] * 20 for i in range(8)], max_tokens=6, ignore_eos=True)


async def test_a_new_life_under_the_old_name_serves(four: Cluster, alone: Alone) -> None:
    """After the deaths above: nobody talks to the old ones."""
    prompts = [[81 + i] * 33 for i in range(12)]
    async with four.client() as client:
        answers = await asyncio.gather(*(complete(client, prompt, max_tokens=6, ignore_eos=True) for prompt in prompts))
    assert [answer["token_ids"] for answer in answers] == alone(prompts, max_tokens=6, ignore_eos=True)
    four.until_whole()


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_worker_that_was_held_up_comes_back(four: Cluster, name: str) -> None:
    """Stopped for longer than a death takes to be seen, then let go: lost, and found again, with nothing left over."""
    async with four.client() as client:
        four.processes[name].send(signal.SIGSTOP)
        await until(lambda: name not in {worker["worker_id"] for worker in four.workers()})
        choice = await complete(client, [91] * 40, max_tokens=5, ignore_eos=True)
        assert len(choice["token_ids"]) == 5
        four.processes[name].send(signal.SIGCONT)
        await asyncio.to_thread(four.until_ready, 2, 2)
        answers = await asyncio.gather(*(complete(client, [92 + i] * 30, max_tokens=5, ignore_eos=True) for i in range(8)))
        assert {len(answer["token_ids"]) for answer in answers} == {5}
    four.until_whole()


async def test_a_restarted_router_gets_its_workers_back(four: Cluster, watch: Stopwatch) -> None:
    abandoned = Watched(watch)
    async with four.client() as client:
        running = asyncio.create_task(abandoned.run(client, [51] * 40, max_tokens=LONG_ANSWER, ignore_eos=True))
        await abandoned.first.wait()
        four.stop("router", signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await running
    four.start_router()
    four.until_ready(2, 2)
    four.until_whole()
    async with four.client() as client:
        assert len((await complete(client, [61] * 40, max_tokens=5, ignore_eos=True))["token_ids"]) == 5


async def test_a_prefill_worker_that_is_told_to_leave_loses_no_request(four: Cluster, alone: Alone) -> None:
    prompts = [[200 + i] * (20 + 5 * i) for i in range(30)]
    expected = alone(prompts, max_tokens=6, ignore_eos=True)
    async with four.client() as client:
        running = [
            asyncio.create_task(complete_later(0.02 * i, client, prompt, max_tokens=6, ignore_eos=True)) for i, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0.25)
        leaving = four.processes.pop("p0")
        leaving.send(signal.SIGTERM)
        answers = await asyncio.gather(*running)
        assert await asyncio.to_thread(leaving.wait) == 0
    assert [answer["token_ids"] for answer in answers] == expected
