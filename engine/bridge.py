"""An engine on its thread, seen from an event loop: what both worker kinds need of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.audit import Violation
from engine.core import EngineCore
from engine.request import EngineEvent
from engine.thread import EngineThread
from protocol.errors import EngineStopped
from protocol.messages import Load

REFRESH_S = 0.1
"""How old the load that a heartbeat tells may be, a running step aside."""

Result = TypeVar("Result")


class EngineBridge:
    """``on_events`` is called on the loop, in the order of the steps, and ``on_violations`` with what the audit has found. ``load``
    and ``counters`` are the last known ones: a heartbeat never waits for a step."""

    def __init__(
        self,
        core: EngineCore,
        on_events: Callable[[list[EngineEvent]], None],
        on_violations: Callable[[list[Violation]], None] | None = None,
    ) -> None:
        self._core = core
        self._on_violations = on_violations
        self._loop = asyncio.get_running_loop()
        self._thread: EngineThread[EngineCore] = EngineThread(core)
        self._thread.on_events(lambda events: self._post(on_events, events))
        self._thread.on_failed(lambda error: self._post(self._on_failed, error))
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self.load: Load = core.load()
        self.counters: dict[str, float] = core.counters()

    def start(self) -> None:
        """The number of torch's threads is a thread's own: the engine's gets what was chosen when the core was built."""
        num_threads = torch.get_num_threads()
        self._thread.call(lambda _: torch.set_num_threads(num_threads))
        self._thread.start()

    async def stop(self) -> None:
        """After the running step. What the cache keeps goes to its second tier then, unless the engine has failed."""
        await asyncio.to_thread(self._thread.stop)
        if self._thread.failed is None:
            await asyncio.to_thread(self._core.close)
        self._failure.cancel()

    def ask(self, function: Callable[[EngineCore], Result], then: Callable[[Future[Result]], None]) -> None:
        """``function(core)`` between two steps, in the order of the asking; then ``then`` on the loop with what came of it.

        In order with ``on_events``: what the engine does after ``function`` is told after ``then``. Its exception may be
        EngineStopped: there's no engine any more.
        """

        def run(core: EngineCore) -> None:
            done: Future[Result] = Future()
            try:
                done.set_result(function(core))
            except Exception as error:  # it belongs to whoever asked
                done.set_exception(error)
            self._post(then, done)  # from the engine's thread, as events are: that keeps the order

        def refused(asked: Future[None]) -> None:
            error = asked.exception()
            if error is not None:
                done: Future[Result] = Future()
                done.set_exception(error)
                self._post(then, done)

        self._thread.call(run).add_done_callback(refused)

    async def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """As ``ask``, for who needs no order. ``function`` runs even if the caller is cancelled meanwhile."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.call(function)))

    async def watch(self) -> None:
        """Keep ``load`` fresh, and check the pools whenever the engine has become idle. Ends only with the engine's failure.

        Raises EngineStopped, or AssertionError when a pool isn't whole: then nothing that this process computes can be trusted.
        """
        checked = False
        while True:
            self.load, self.counters, found = await self.call(lambda core: (core.load(), core.counters(), core.audit.take()))
            if found and self._on_violations is not None:
                self._on_violations(found)
            idle = not (self.load.waiting or self.load.running or self.load.held_for_peers)
            if idle and not checked:
                await self.call(lambda core: core.check_integrity())
            checked = idle
            await asyncio.wait([self._failure], timeout=REFRESH_S)
            if self._failure.done():
                self._failure.result()

    def _post(self, function: Callable[[Result], None], value: Result) -> None:
        """From the engine's thread. A loop that is closed already has no use for it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)

    def _on_failed(self, error: BaseException) -> None:
        if not self._failure.done():
            failure = EngineStopped(f"the engine failed: {error!r}")
            failure.__cause__ = error
            self._failure.set_exception(failure)
