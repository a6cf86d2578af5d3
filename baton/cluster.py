"""A local cluster: one router and some workers as child processes, supervised, with one coloured log.

Nothing outlives the parent: on Linux each child asks the kernel for SIGTERM when the parent dies; on the way out router and
workers are asked to end, and get SIGKILL after a grace time. A worker that dies is started again with a growing pause; a router that
dies ends the cluster.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from protocol.errors import BatonError

DRAIN_S = 1.0
STOP_GRACE_S = 45.0
"""A worker drains for some seconds, then writes what its cache keeps to files, if it has any, for half a minute at most."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
HEALTHY_AFTER_S = 30.0
PR_SET_PDEATHSIG = 1

LogSink = Callable[[str, str], None]
"""(process name, line)."""


class ClusterError(BatonError):
    """The cluster can't start or can't go on. ``code`` is the exit code of the process that ended it."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One child: ``python -m <module> <args>``."""

    name: str
    module: str
    args: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of ours."""


@dataclass(slots=True)
class Child:
    spec: Spec
    process: asyncio.subprocess.Process
    started_at: float
    reader: asyncio.Task[None]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Last lines, for the error message when it dies at once."""


class LocalCluster:
    """Use as an async context manager; then ``await ready()`` and, to serve, ``await supervise()``."""

    def __init__(self, specs: Sequence[Spec], url: str, log: LogSink) -> None:
        self._specs = specs
        self.url = url
        self._log = log
        self._children: dict[str, Child] = {}

    async def __aenter__(self) -> LocalCluster:
        for spec in self._specs:
            await self._start(spec)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    async def ready(self, timeout_s: float = math.inf) -> None:
        """Wait until the router says that it can serve. Raises ClusterError as soon as a child ends, with its last lines."""
        deadline = time.monotonic() + timeout_s
        reason = "the router does not answer"
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                await self._raise_if_ended()
                try:
                    answer = await client.get(f"{self.url}/ready")
                    if answer.status_code == httpx.codes.OK:
                        return
                    reason = answer.text
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        raise ClusterError(f"the cluster was not ready after {timeout_s:.0f} s: {reason}")

    async def supervise(self) -> None:
        """Run until cancelled or until the router ends (ClusterError). Workers that die are started again."""
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._keep_running(spec))

    async def stop(self) -> None:
        """The router first, so that it can tell running clients; then the workers. Returns when all have ended.

        Two SIGTERM for the router: the first is enough for a process that is still loading, the second means "at once" to one that
        drains. One SIGINT for workers: it bounds their drain, and a second signal could cost what they still have to write.
        """
        router, workers = (
            [child for child in self._children.values() if (child.spec.module == "router") == is_router] for is_router in (True, False)
        )
        for _ in range(2):
            await _signal_all(router, signal.SIGTERM)
        await asyncio.gather(*map(self._end, router))
        await _signal_all(workers, signal.SIGINT)
        await asyncio.gather(*map(self._end, workers))
        self._children.clear()

    def kill(self) -> None:
        """No more patience: SIGKILL for all. ``stop`` then returns soon."""
        for child in self._children.values():
            _signal(child, signal.SIGKILL)

    async def _start(self, spec: Spec) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **spec.environment}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", spec.module, *spec.args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C reaches only us; we pass it on in order
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        child = Child(spec, process, time.monotonic(), asyncio.create_task(asyncio.sleep(0)))
        child.reader = asyncio.create_task(self._pump(child))
        self._children[spec.name] = child

    async def _pump(self, child: Child) -> None:
        assert child.process.stdout is not None
        async for raw in child.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            child.tail.append(line)
            self._log(child.spec.name, line)

    async def _raise_if_ended(self) -> None:
        for child in self._children.values():
            if child.process.returncode is not None:
                await child.reader
                told = "\n  ".join(child.tail) or "(it printed nothing)"
                raise ClusterError(f"{child.spec.name} ended with code {child.process.returncode}:\n  {told}", child.process.returncode)

    async def _keep_running(self, spec: Spec) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            child = self._children[spec.name]
            code = await child.process.wait()
            if spec.module == "router":
                raise ClusterError(f"the router ended with code {code}", code)
            if time.monotonic() - child.started_at > HEALTHY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            self._log("baton", f"{spec.name} ended with code {code}; starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await self._start(spec)

    async def _end(self, child: Child) -> None:
        if not await _wait([child], STOP_GRACE_S):
            self._log("baton", f"{child.spec.name} did not end in {STOP_GRACE_S:.0f} s; killing it")
            _signal(child, signal.SIGKILL)
            await child.process.wait()
        await child.reader


async def _wait(children: Sequence[Child], timeout_s: float) -> bool:
    """Whether all have ended in time."""
    try:
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.process.wait()
    except TimeoutError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        child.process.send_signal(number)


async def _signal_all(children: Sequence[Child], number: signal.Signals) -> None:
    """And give them a moment to end."""
    for child in children:
        _signal(child, number)
    await _wait(children, DRAIN_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
