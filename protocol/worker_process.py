"""What both worker processes do around their work: logging, signals, exit codes.

Exit codes: 0 left in good order; 1 told to leave at once, or a fault of ours; 2 a wrong setting, file or checkpoint; 3 the router
refuses this worker.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from protocol.errors import CheckpointError, ConfigError, Unwelcomed

EXIT_OK = 0
EXIT_AT_ONCE = 1
EXIT_WRONG_SETTING = 2
EXIT_UNWELCOME = 3
INTERRUPT_LIMIT_S = 5.0
"""Ctrl-C drains like SIGTERM, but nobody at a terminal waits long."""

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

    def listen(self, main: asyncio.Task[None]) -> None:
        """SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, main)

    def _on_signal(self, number: signal.Signals, main: asyncio.Task[None]) -> None:
        if self.asked:
            log.warning("%s again: leaving at once", number.name)
            main.cancel()
            return
        log.info("%s: draining", number.name)
        self.ask(INTERRUPT_LIMIT_S if number is signal.SIGINT else None)


def run_process(name: str, main: Callable[[], Awaitable[None]]) -> int:
    """Runs ``main`` on a fresh loop and says on standard error why it ended, if not well. Returns the exit code.

    Faults of ours are not caught: their traceback is the message.
    """
    try:
        asyncio.run(_as_coroutine(main))
    except (ConfigError, CheckpointError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTING
    except Unwelcomed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_UNWELCOME
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_AT_ONCE
    return EXIT_OK


async def _as_coroutine(main: Callable[[], Awaitable[None]]) -> None:
    await main()
