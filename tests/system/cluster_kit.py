"""A real cluster: router, prefill and decode workers as processes of their own, UCX between them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

START_S = 240.0
STOP_S = 60.0
PATIENCE_S = 60.0
POLL_S = 0.05

T = TypeVar("T")


def free_port() -> int:
    """Below the ports that the kernel gives to whoever dials: one of those may be gone before its process binds it, or dial itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Stopwatch:
    """Seconds as this machine can tell them: wake-ups every 50 ms, counted by a thread. While the machine is too busy to wake anybody
    in time it counts fewer, so that a limit in these seconds is about the cluster, not about its neighbours."""

    def __init__(self) -> None:
        self._wakeups = 0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def seconds(self) -> float:
        return self._wakeups * POLL_S

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._wakeups += 1


async def until(told: Callable[[], T]) -> T:
    """What it tells as soon as that is something."""
    async with asyncio.timeout(PATIENCE_S):
        while not (answer := told()):  # noqa: ASYNC110  (anything may be waited for)
            await asyncio.sleep(POLL_S)
    return answer


@dataclass
class Process:
    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    file: IO[bytes]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code. Kills it, and fails, when it takes longer."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"{self.name} didn't leave within {timeout_s} s:\n{self.text()}") from None
        finally:
            self.file.close()

    def until_says(self, words: str, timeout_s: float = START_S) -> None:
        until = time.monotonic() + timeout_s
        while words not in self.text():
            if self.popen.poll() is not None or time.monotonic() > until:
                self.popen.kill()
                raise AssertionError(f"{self.name} (ended with {self.popen.poll()}) didn't say {words!r}:\n{self.text()}")
            time.sleep(POLL_S)


def launch(module: str, folder: Path, name: str, *args: str) -> Process:
    """``python -m module args``, with its output in a file."""
    log = folder / f"{name}-{time.monotonic_ns()}.log"
    file = log.open("wb")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    popen = subprocess.Popen([sys.executable, "-P", "-m", module, *args], stdout=file, stderr=subprocess.STDOUT, env=environ)
    return Process(name, popen, log, file)


@dataclass
class Answer:
    """One choice, as its stream told it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    usage: dict[str, Any] | None = None


class Cluster:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.control = f"tcp://127.0.0.1:{free_port()}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, Process] = {}
        self.speculation: int | None = None

    # ---- processes

    def start_router(self, *args: str) -> None:
        self._launch("router", "router", "--port", str(self.port), *args)

    def start_worker(self, role: str, name: str, *args: str, model: Path | None = None) -> Process:
        return self._launch(f"{role}_worker", name, "--worker-id", name, "--threads", "1", *args, model=model)

    def _launch(self, module: str, name: str, *args: str, model: Path | None = None) -> Process:
        process = launch(module, self.folder, name, "--model", str(model or self.model), "--control", self.control, *args)
        self.processes[name] = process
        return process

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send(number)
        return process.wait()

    def stop_all(self) -> None:
        """Workers first, then the router. Raises AssertionError when somebody doesn't leave in good order."""
        names = [name for name in self.processes if name != "router"]
        try:
            for name in names:
                self.processes[name].send(signal.SIGTERM)
            codes = {name: self.processes.pop(name).wait() for name in names}
            if "router" in self.processes:
                codes["router"] = self.stop("router")
            assert set(codes.values()) <= {0}, codes
        finally:
            for process in self.processes.values():  # none, if all went well
                process.send(signal.SIGKILL)
                process.wait()

    def use_speculation(self, speculation: int | None = None) -> None:
        """Decode worker "d" with this K; the one with another is drained away. None: whatever it has."""
        if "d" in self.processes and speculation in (None, self.speculation):
            return
        before = self.processes.pop("d", None)
        self.speculation = 3 if speculation is None else speculation
        self._launch("decode_worker", "d", "--worker-id", f"d-{self.speculation}", "--threads", "1", "--speculation", str(self.speculation))
        if before is not None:  # it drains while the other one starts
            before.send(signal.SIGTERM)
            assert before.wait() == 0
        self.until_ready(1, 1)

    # ---- what it says of itself

    def until_ready(self, num_prefill: int, num_decode: int) -> None:
        """So many of each, all paired with each other, nothing at work."""
        until = time.monotonic() + START_S
        while not self._ready(num_prefill, num_decode):
            for process in self.processes.values():
                assert process.popen.poll() is None, f"{process.name} ended with {process.popen.returncode}:\n{process.text()}"
            assert time.monotonic() < until, "\n".join(process.text() for process in self.processes.values())
            time.sleep(POLL_S)

    def _ready(self, num_prefill: int, num_decode: int) -> bool:
        try:
            workers = self.workers()
        except httpx.TransportError:
            return False
        prefills = {worker["epoch"] for worker in workers if worker["role"] == "prefill"}
        decodes = [worker for worker in workers if worker["role"] == "decode"]
        return len(prefills) == num_prefill and len(decodes) == num_decode and all(set(worker["paired"]) == prefills for worker in decodes)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=PATIENCE_S).json()
        return answer

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.health()["workers"]
        return workers

    def until_whole(self, timeout_s: float = PATIENCE_S) -> None:
        """Every page of every worker is free again, and no request is left anywhere."""
        until = time.monotonic() + timeout_s
        while broken := [story for worker in self.workers() if (story := _not_whole(worker))]:
            assert time.monotonic() < until, broken
            time.sleep(POLL_S)
        assert self.health()["requests"] == {"running": 0, "waiting": 0}

    # ---- clients

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=START_S, limits=httpx.Limits(max_connections=None))


def _not_whole(worker: dict[str, Any]) -> str | None:
    load, capacity = worker["load"], worker["capacity"]
    busy = load["waiting"] + load["running"] + load["held_for_peers"]
    blocks, slots = capacity["kv_blocks"] - 1, capacity["state_slots"] - 1
    if busy or load["free_blocks"] != blocks or load["free_slots"] != slots:
        return f"{worker['worker_id']}: {load}, of {blocks} blocks and {slots} slots"
    return None


async def complete(client: httpx.AsyncClient, prompt: Sequence[int] | str, **params: Any) -> dict[str, Any]:
    """The choice of one completion, not streamed. ``return_token_ids`` is on."""
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True} | params
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def stream(client: httpx.AsyncClient, prompt: Sequence[int] | str, **params: Any) -> AsyncGenerator[Answer, None]:
    """The growing answer after each event."""
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "stream": True} | params
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:  # it failed before anything was streamed
            answer.error = json.loads(await response.aread())["error"]
            yield answer
            return
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                _hear(answer, line.removeprefix("data: "))
                yield answer


def _hear(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    answer.error = event.get("error")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        assert answer.finish_reason is None, "something comes after the end"
        answer.token_ids += choice.get("token_ids") or []
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"]


async def stream_to_end(client: httpx.AsyncClient, prompt: Sequence[int] | str, **params: Any) -> Answer:
    answer = Answer()
    async for answer in stream(client, prompt, **params):  # noqa: B007  (the last one is the whole)
        pass
    return answer


async def complete_later(delay_s: float, client: httpx.AsyncClient, prompt: Sequence[int] | str, **params: Any) -> dict[str, Any]:
    await asyncio.sleep(delay_s)
    return await complete(client, prompt, **params)
