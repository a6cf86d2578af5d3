"""What both worker processes do around their work: logging, signals, exit codes.

Exit codes: 0 left in good order; 1 told to leave at once, or a fault of ours; 2 a wrong setting, file or checkpoint; 3 the router
refuses this worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from protocol.errors import CheckpointError, ConfigError, Unwelcomed
from protocol.worker_link import WorkerLink

EXIT_OK = 0
EXIT_AT_ONCE = 1
EXIT_WRONG_SETTING = 2
EXIT_UNWELCOME = 3
INTERRUPT_LIMIT_S = 5.0
"""Ctrl-C drains like SIGTERM, but nobody at a terminal waits long."""
SETTLE_S = 1.0
"""What the router ordered before it heard that this worker leaves may still be on its way."""
LAST_CHANCE_S = 2.0
"""After a drain that took too long: what was cancelled then has this long to end."""
CHECK_S = 0.05

log = logging.getLogger("baton.process")


def start_logging(level: str) -> None:
    """One line per entry on standard error."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


class Departure:
    """Whether this process was asked to leave. The first request drains, a second one leaves at once (``main`` is cancelled)."""

    def __init__(self, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._asked = asyncio.Event()
        self.limit_s = drain_timeout_s
        """How long the drain may take."""

    def ask(self, limit_s: float | None = None) -> None:
        """By a signal or by the router. The first limit holds."""
        if not self._asked.is_set():
            self.limit_s = self._drain_timeout_s if limit_s is None else min(limit_s, self._drain_timeout_s)
            self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()

    def listen(self) -> None:
        """To SIGTERM and SIGINT from now on. The current task is ``main``."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, main)

    def _on_signal(self, number: signal.Signals, main: asyncio.Task[Any]) -> None:
        if self.asked:
            log.warning("%s again: leaving at once", number.name)
            main.cancel()
            return
        log.info("%s: draining", number.name)
        self.ask(INTERRUPT_LIMIT_S if number is signal.SIGINT else None)


class Work(Protocol):
    """A worker's requests, as far as leaving needs to know."""

    @property
    def num_open(self) -> int:
        """Requests and hand-offs that haven't ended."""

    def cancel_all(self) -> None: ...


async def serve(
    parts: Sequence[Coroutine[Any, Any, None]],
    *,
    tasks: asyncio.TaskGroup,
    work: Work,
    link: WorkerLink,
    departure: Departure,
    take_nothing_new: Callable[[], None] = lambda: None,
) -> None:
    """Run ``parts`` in ``tasks`` until this process was asked to leave, drain, say goodbye, stop them.

    The router places nothing on a worker that says it is draining; ``take_nothing_new`` is for what it sent before it heard that.
    """
    running = [tasks.create_task(part) for part in parts]
    await departure.wait()
    take_nothing_new()
    link.beat()
    if link.welcomed:
        await asyncio.sleep(SETTLE_S)
    if not await _ended(work, departure.limit_s):
        log.warning("%d requests or hand-offs haven't ended within %.0f s: cancelled", work.num_open, departure.limit_s)
        work.cancel_all()
        await _ended(work, LAST_CHANCE_S)
    await link.leave()
    for task in running:
        task.cancel()
    log.info("left")


async def _ended(work: Work, timeout_s: float) -> bool:
    for _ in range(round(timeout_s / CHECK_S)):
        if not work.num_open:
            break
        await asyncio.sleep(CHECK_S)
    return not work.num_open


def default_worker_id(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def local_address_towards(control: str) -> str:
    """The IPv4 address from which this host reaches the router's ``control`` address. Raises ConfigError."""
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except OSError as error:
            raise ConfigError(f"control={control!r}: no way there: {error}") from None
        address: str = probe.getsockname()[0]
    return address


def run_process(name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs ``main`` on a fresh loop and says on standard error why it ended, if not well. Returns the exit code.

    Until ``Departure.listen`` both signals end the process at once: nothing is held yet. Faults of ours are not caught: their
    traceback is the message.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        asyncio.run(_with_failing_callbacks(main))
    except asyncio.CancelledError:
        return EXIT_AT_ONCE
    except Exception as error:
        cause = _first_of(error)
        if isinstance(cause, (ConfigError, CheckpointError, Unwelcomed)):
            print(f"{name}: {cause}", file=sys.stderr)
            return EXIT_UNWELCOME if isinstance(cause, Unwelcomed) else EXIT_WRONG_SETTING
        raise
    return EXIT_OK


async def _with_failing_callbacks(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``main``; an exception in a callback of the loop, which asyncio would only log, ends it too: whoever waits for what the
    callback didn't do would wait for ever."""
    task, failures = asyncio.current_task(), list[BaseException]()
    assert task is not None

    def on_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "exception" in context and not failures:
            failures.append(context["exception"])
            task.cancel()

    asyncio.get_running_loop().set_exception_handler(on_failure)
    try:
        await main()
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise


def _first_of(error: BaseException) -> BaseException:
    """What a task group's exception is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
