"""``baton up``: real processes, real signals, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from baton.cluster import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0


class Up:
    """A running ``baton up`` and its children. What it says goes into ``log``."""

    def __init__(self, log: Path, *args: str) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "baton", "up", "--port", str(self.port), "--threads", "1", *args]
        with log.open("wb") as file:
            self.process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)
        self.first_children: dict[str, psutil.Process] = {}

    def start(self) -> None:
        until(self.is_ready)
        self.first_children = self.children()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def children(self) -> dict[str, psutil.Process]:
        """By module: router, prefill_worker, decode_worker (one of each in these tests)."""
        return {words[2]: child for child in self.process.children() if len(words := _words(child)) > 2}

    def epochs(self) -> set[str]:
        """Of the decode workers that the router knows."""
        workers = httpx.get(f"{self.url}/health", timeout=30).json()["workers"]
        return {worker["epoch"] for worker in workers if worker["role"] == "decode"}

    def ask(self) -> str:
        body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


def _words(process: psutil.Process) -> list[str]:
    """Its command line; nothing for one that has just ended or isn't itself yet."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it didn't come true in time"
        time.sleep(0.05)


def is_over(process: psutil.Process) -> bool:
    """Ended; whether its parent has taken note is another matter."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    config = tmp_path / "baton.toml"
    config.write_text(f'snapshot_dir = "{tmp_path}/pages"\n')
    running = Up(tmp_path / "log", "--speculation", "3", "--config", str(config))
    try:
        running.start()
        yield running
    finally:
        for process in [running.process, *running.first_children.values()]:
            if process.is_running():
                process.kill()
        running.process.wait()


def test_a_second_ctrl_c_kills_even_a_frozen_worker(up: Up) -> None:
    frozen = up.first_children["decode_worker"]
    frozen.suspend()
    up.process.send_signal(signal.SIGINT)
    until(lambda: "once more kills at once" in up.log.read_text())
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0
    assert "killing everything" in up.log.read_text()
    assert all(is_over(child) for child in up.first_children.values())


def test_a_killed_launcher_takes_its_children_along(up: Up) -> None:
    up.process.kill()
    up.process.wait(PATIENCE_S)
    until(lambda: all(is_over(child) for child in up.first_children.values()))


def test_a_killed_worker_is_started_again_and_ctrl_c_ends_every_process(up: Up) -> None:
    before = up.ask()
    epochs = up.epochs()
    killed = up.first_children["decode_worker"]
    killed.kill()
    until(lambda: up.children().get("decode_worker", killed).pid != killed.pid)
    until(lambda: bool(up.epochs() - epochs) and up.is_ready())
    assert up.ask() == before
    children = up.children()
    assert len(children) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0
    assert all(is_over(child) for child in children.values())
    assert list((up.log.parent / "pages").rglob("*.page")), "an orderly end writes what the caches held"
    assert "leaving at once" not in up.log.read_text()
