"""The engine seen from a loop: answers and events in order, and failures that reach the worker."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.bridge import EngineBridge
from engine.request import EngineEvent, FinishedEvent
from protocol.errors import EngineStopped
from tests.engine.engine_kit import prompt, request
from tests.workers.together import PATIENCE_S, make_core, until


async def test_an_answer_comes_before_what_followed_it(checkpoint: Path) -> None:
    """However the threads are scheduled: many short requests, each is known to be taken before its first event."""
    told: list[tuple[str, str]] = []
    all_finished = asyncio.Event()

    def on_events(events: list[EngineEvent]) -> None:
        told.extend((event.key.request_id, type(event).__name__) for event in events)
        if sum(kind == FinishedEvent.__name__ for _, kind in told) == 40:
            all_finished.set()

    bridge = EngineBridge(make_core(checkpoint), on_events)
    bridge.start()
    for number in range(40):
        wanted = request(number, prompt(3), max_tokens=1)

        def taken(submitted: Future[None], name: str = str(number)) -> None:
            assert submitted.exception() is None
            told.append((name, "taken"))

        bridge.ask(lambda core, wanted=wanted: core.submit(wanted), taken)  # type: ignore[misc]
        await asyncio.sleep(0.002 * (number % 3))
    async with asyncio.timeout(PATIENCE_S):
        await all_finished.wait()
    for number in range(40):
        kinds = [kind for name, kind in told if name == str(number)]
        assert kinds == ["taken", "StartedEvent", "TokensEvent", "FinishedEvent"]
    await bridge.stop()


async def test_errors_belong_to_who_asked(checkpoint: Path) -> None:
    bridge = EngineBridge(make_core(checkpoint), lambda events: None)
    bridge.start()
    with pytest.raises(ValueError, match="vocabulary"):
        await bridge.call(lambda core: core.submit(request("r", [999])))
    assert await bridge.call(lambda core: core.cancel(request("r", [1]).key)) is False
    await bridge.stop()
    with pytest.raises(EngineStopped):
        await bridge.call(lambda core: core.load())
    answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    bridge.ask(lambda core: core.load(), lambda asked: answered.set_result(asked.exception()))
    assert isinstance(await answered, EngineStopped)


async def test_a_failed_engine_ends_the_watch(checkpoint: Path) -> None:
    core = make_core(checkpoint)
    bridge = EngineBridge(core, lambda events: None)
    bridge.start()
    watch = asyncio.create_task(bridge.watch())
    core.step = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    await bridge.call(lambda core: core.submit(request("r", prompt(3))))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            await watch
    await bridge.stop()


async def test_a_broken_pool_is_found_when_idle(checkpoint: Path) -> None:
    core = make_core(checkpoint)
    core.pools.blocks.take(1)
    bridge = EngineBridge(core, lambda events: None)
    bridge.start()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(AssertionError, match="block 1 counts"):
            await bridge.watch()
    await bridge.stop()


async def test_a_failing_event_handler_is_a_failure_of_the_loop(checkpoint: Path) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def on_events(events: list[EngineEvent]) -> None:
        raise KeyError("a bug")

    bridge = EngineBridge(make_core(checkpoint), on_events)
    bridge.start()
    await bridge.call(lambda core: core.submit(request("r", prompt(3), max_tokens=1)))
    await until(lambda: failures)
    assert isinstance(failures[0]["exception"], KeyError)  # which ends a worker, see protocol.worker_process
    await bridge.stop()
