"""How a worker process ends: exit codes, signals, failures that asyncio alone would only log."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from protocol.errors import CheckpointError, ConfigError, Unwelcomed
from protocol.worker_process import INTERRUPT_LIMIT_S, Departure, local_address_towards, run_process


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def raising(error: Exception) -> Callable[[], object]:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await asyncio.sleep(0)
            tasks.create_task(_raise(error))

    return main


async def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("port=1 is taken"), 2), (CheckpointError("no config.json"), 2), (Unwelcomed("dtype", "float64 here"), 3)],
)
def test_errors_of_the_user_are_one_line_and_a_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_process("baton-x", raising(error)) == code  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"baton-x: {error}\n"


def test_a_fault_of_ours_is_not_hidden() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_process("baton-x", raising(RuntimeError("a bug")))  # type: ignore[arg-type]
    assert caught.group_contains(RuntimeError, match="a bug")


def test_a_failing_callback_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        run_process("baton-x", main)
    assert "Exception in callback" in caplog.text


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGTERM, 30.0), (signal.SIGINT, INTERRUPT_LIMIT_S)])
def test_a_signal_drains(number: signal.Signals, limit_s: float) -> None:
    limits = []

    async def main() -> None:
        departure = Departure(30.0)
        departure.listen()
        assert not departure.asked
        os.kill(os.getpid(), number)
        async with asyncio.timeout(60):
            await departure.wait()
        limits.append(departure.limit_s)

    assert run_process("baton-x", main) == 0
    assert limits == [limit_s]


def test_a_second_signal_leaves_at_once() -> None:
    async def main() -> None:
        departure = Departure(30.0)
        departure.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        await departure.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    assert run_process("baton-x", main) == 1


def test_the_address_towards_the_router() -> None:
    assert local_address_towards("tcp://127.0.0.1:5550") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"256\.256\.256\.256"):  # no name server is asked
        local_address_towards("tcp://256.256.256.256:5550")
