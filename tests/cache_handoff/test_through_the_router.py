"""A real router over HTTP and real workers, all in one process: the same tokens under load, where turns go, usage, flushing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.core import EngineCore
from prefill_worker.worker import PrefillWorker
from protocol.config import DecodeSettings, PrefillSettings, RouterSettings
from protocol.sockets import Hub
from router.server import Router
from tests.cache_handoff.load_kit import AT_ONCE, NEW_TOKENS, ask_all
from transfer.loopback import Loopback

PATIENCE_S = 60.0
TIGHT: dict[str, Any] = {"step_tokens": 64, "max_prefill_chunk": 32, "snapshot_tokens": 32, "max_running": AT_ONCE, "kv_blocks": 600}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody dies here, however slow the machine is."""
    for module in ("router.membership", "decode_worker.peers", "prefill_worker.peers"):
        monkeypatch.setattr(f"{module}.DEAD_AFTER_S", PATIENCE_S)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  (anything may be waited for)
            await asyncio.sleep(0.01)


@dataclass
class Served:
    client: httpx.AsyncClient
    router: Router
    prefill: PrefillWorker
    decodes: list[DecodeWorker]

    @property
    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [self.prefill, *self.decodes]

    async def count(self, worker: PrefillWorker | DecodeWorker, name: str) -> float:
        """The engine's."""
        return await worker.bridge.call(lambda core: core.counters()[name])

    async def whole(self) -> None:
        await until(lambda: not any(worker.requests.num_open for worker in self.workers))
        for worker in self.workers:
            await worker.bridge.call(lambda core: core.check_integrity())
            load = await worker.bridge.call(lambda core: core.load())
            assert (load.waiting, load.running, load.held_for_peers) == (0, 0, 0)
            assert load.free_blocks == worker.core.capacity.num_blocks - 1
            assert load.free_slots == worker.core.capacity.num_slots - 1


@contextlib.asynccontextmanager
async def served(model: Path, *, num_decode: int = 1, **config: Any) -> AsyncIterator[Served]:
    router = Router(RouterSettings(model=model, port=0, control="tcp://127.0.0.1:0"))
    network, hub = Loopback(), Hub("tcp://127.0.0.1:0")

    def core(speculation: int) -> EngineCore:
        return EngineCore(EngineConfig(model=model, threads=1, speculation=speculation, **config))

    common: dict[str, Any] = {"model": model, "control": router.control}
    prefill = PrefillWorker(PrefillSettings(worker_id="p", **common), core(0), hub, hub.address, network.transport(), "loopback")
    decodes = [
        DecodeWorker(DecodeSettings(worker_id=f"d{number}", speculation=3, **common), core(3), network.transport(), "loopback")
        for number in range(num_decode)
    ]
    parts: list[Router | PrefillWorker | DecodeWorker] = [router, prefill, *decodes]
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        await until(lambda: router.started and sum(bool(worker.paired) for worker in router.cluster.table) == num_decode)
        async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client:
            yield Served(client, router, prefill, decodes)
        assert not any(task.done() for task in tasks)
    finally:
        router.stop()
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hub.close()


async def test_cold_and_warm_with_and_without_are_the_same(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with served(model, **TIGHT) as all_of_it:
        client = all_of_it.client
        without, none = await ask_all(client, prompts, cache_prompt=False)
        assert without == expected
        assert sum(none) == 0
        cold, hits = await ask_all(client, prompts)
        assert cold == expected
        assert sum(hits) > 0, "beginnings are shared"
        await all_of_it.whole()
        computed = await all_of_it.count(all_of_it.prefill, "baton_prompt_tokens_total")
        warm, full = await ask_all(client, prompts)
        assert warm == expected
        assert full == [len(prompt) - 1 for prompt in prompts], "there is room for all of them"
        assert await all_of_it.count(all_of_it.prefill, "baton_prompt_tokens_total") == computed, "P is not used"
        flushed = (await client.post("/flush_cache")).json()
        assert flushed["complete"] is True
        assert all(worker["freed_blocks"] > 0 and worker["freed_snapshots"] > 0 for worker in flushed["workers"])
        again, after = await ask_all(client, prompts)
        assert again == expected
        assert sum(after) < sum(full)
        await all_of_it.whole()
        for worker in all_of_it.workers:
            assert await all_of_it.count(worker, "baton_state_audit_violations_total") == 0


async def test_turns_go_where_the_turns_before_them_went(model: Path, prompts: list[list[int]]) -> None:
    """Two decode workers, several conversations at once; each turn is the whole history, the answers included, and three tokens more."""
    async with served(model, num_decode=2, **TIGHT) as all_of_it:
        long = [prompt for prompt in prompts if len(prompt) >= 96][:6]
        histories = [[number + 9, *prompt] for number, prompt in enumerate(long)]
        for turn in range(3):
            answers, cached = await ask_all(all_of_it.client, histories)
            if turn:
                assert cached == [len(history) - 1 - 3 for history in histories], f"turn {turn}"
            histories = [[*history, *answer, 5, 6, 7] for history, answer in zip(histories, answers, strict=True)]
        counts = [await all_of_it.count(worker, "baton_output_tokens_total") for worker in all_of_it.decodes]
        assert all(count >= 3 * NEW_TOKENS for count in counts), "both have some"
        served_before = await all_of_it.count(all_of_it.prefill, "baton_prompt_tokens_total")
        assert served_before <= sum(len(prompt) for prompt in long), "only first turns were anybody's to prefill"
        await all_of_it.whole()
