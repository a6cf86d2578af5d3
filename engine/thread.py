"""The engine's own thread, so that a worker's event loop stays quick while a step computes.

Everything that touches the core runs here: steps, and between steps whatever ``call`` was given. The owner's other
threads only put calls in and take events and futures out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from engine.request import EngineEvent
from protocol.errors import EngineStopped

logger = logging.getLogger(__name__)


class StepCore(Protocol):
    """What the thread itself needs of the core; ``call`` hands the whole core to its functions."""

    def has_work(self) -> bool:
        """True when a step would get something done."""
        ...

    def step(self) -> list[EngineEvent]: ...


Core = TypeVar("Core", bound=StepCore)
Result = TypeVar("Result")


class EngineThread(Generic[Core]):
    """Runs ``core``. Register callbacks, then ``start``; they are called on the engine thread.

    An exception that escapes a step or an event callback ends the thread: it is logged, kept in ``failed``, told to the
    failure callback, and every pending and later ``call`` gets EngineStopped with it as the cause.
    """

    def __init__(self, core: Core, name: str = "engine") -> None:
        self._core = core
        self._calls: SimpleQueue[_Call[Core, Any] | None] = SimpleQueue()  # None only wakes the thread
        self._lock = threading.Lock()  # a call is queued before the thread ends, or refused
        self._refusal: str | None = None
        self._event_callback: Callable[[list[EngineEvent]], None] | None = None
        self._failure_callback: Callable[[BaseException], None] | None = None
        self._stopping = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def on_events(self, callback: Callable[[list[EngineEvent]], None]) -> None:
        """``callback`` gets the events of each step that has some. Before ``start``."""
        assert self._thread.ident is None, "register callbacks before start"
        self._event_callback = callback

    def on_failed(self, callback: Callable[[BaseException], None]) -> None:
        """``callback`` gets the exception that ended the thread, after all pending calls got theirs. Before ``start``."""
        assert self._thread.ident is None, "register callbacks before start"
        self._failure_callback = callback

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Finish the running step and the calls made so far, then end. May be called again. Raises TimeoutError."""
        assert threading.current_thread() is not self._thread, "the engine thread can't wait for itself"
        self._stopping.set()
        self._calls.put(None)
        if self._thread.ident is None:
            self._refuse_calls("the engine was never started")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def failed(self) -> BaseException | None:
        """The exception that ended the thread, or None."""
        return self._failed

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[Core], Result]) -> Future[Result]:
        """Run ``function(core)`` between steps, in the order of the calls. Its result or exception is the future's.

        The future gets EngineStopped when the thread has ended. A future that is cancelled in time is not run.
        """
        call = _Call(function)
        with self._lock:
            if self._refusal is None:
                self._calls.put(call)
                return call.future
        call.refuse(self._refusal, self._failed)
        return call.future

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_calls(wait=not self._core.has_work())
                if self._core.has_work() and not self._stopping.is_set():
                    self._tell(self._core.step())
            self._run_calls(wait=False)
        except BaseException as error:
            self._failed = error
            logger.critical("the engine thread failed", exc_info=error)
            self._refuse_calls(f"the engine failed: {error!r}")
            if self._failure_callback is not None:
                self._failure_callback(error)
        else:
            self._refuse_calls("the engine was stopped")

    def _run_calls(self, *, wait: bool) -> None:
        """Run what has been asked for so far; with ``wait``, sleep until there is something."""
        try:
            call = self._calls.get(block=wait)
            while True:
                if call is not None:
                    call.run(self._core)
                call = self._calls.get_nowait()
        except Empty:
            return

    def _tell(self, events: list[EngineEvent]) -> None:
        if events and self._event_callback is not None:
            self._event_callback(events)

    def _refuse_calls(self, reason: str) -> None:
        with self._lock:
            self._refusal = reason
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                call.refuse(reason, self._failed)


class _Call(Generic[Core, Result]):
    def __init__(self, function: Callable[[Core], Result]) -> None:
        self.future: Future[Result] = Future()
        self._function = function

    def run(self, core: Core) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(core)
        except BaseException as error:  # it belongs to whoever called, and the engine goes on
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, reason: str, cause: BaseException | None) -> None:
        stopped = EngineStopped(reason)
        stopped.__cause__ = cause
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(stopped)
