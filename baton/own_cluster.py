"""A local cluster for commands that need a server and were given none: quiet, ready, and gone with the command."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from baton.cluster import ClusterError, LocalCluster
from baton.console import err
from baton.up import Plan, plan_cluster
from protocol.config import UpSettings, load_settings

READY_S = 120.0


def plan_own_cluster(model: Path | None, speculation: int | None, **more: object) -> Plan:
    """What ``baton up`` would start, on a free port of this machine. Raises ConfigError and ValueError."""
    flags = {"model": model, "speculation": speculation, "host": "127.0.0.1", "port": 0} | more
    return plan_cluster(load_settings(UpSettings, "baton", flags, None, os.environ), None, os.environ)


@asynccontextmanager
async def own_cluster(plan: Plan) -> AsyncIterator[LocalCluster]:
    """Ready to serve. Raises ClusterError, after telling what the processes said."""
    log: deque[str] = deque(maxlen=200)
    async with LocalCluster(plan.specs, plan.url, lambda name, line: log.append(f"{name}: {line}")) as cluster:
        try:
            await cluster.ready(READY_S)
        except ClusterError:
            err.print("\n".join(log), markup=False)
            raise
        yield cluster


@contextmanager
def cluster_in_background(plan: Plan) -> Iterator[LocalCluster]:
    """The same on a thread of its own, for a command that waits for the keyboard; workers that die are started again."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(own_cluster(plan)) as cluster:
        supervision = portal.start_task_soon(cluster.supervise)
        try:
            yield cluster
        finally:
            supervision.cancel()
