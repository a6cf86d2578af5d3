"""Report A's fault in a running split cluster: the audit tells it, by tags at once and by numbers soon after, through the router."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
from typer.testing import CliRunner

from baton.bench_fewshot import audit_of
from baton.cluster import LocalCluster
from baton.local_server import with_worker_settings
from baton.main import app
from baton.own_cluster import plan_own_cluster
from baton.reproduce import REPRODUCTIONS, Fault, with_fault
from loadgen.client import Client, find_server
from tests.system.cluster_kit import PATIENCE_S, complete

FAULT = Fault.COLUMN_PUBLISHING_BELIEVED
GRID = 64
"""Prompts are longer than what a decode worker completes by itself."""
TIGHT = {"snapshot_tokens": GRID, "step_tokens": 160, "max_prefill_chunk": 160, "audit_sample": 1.0}
ROUNDS = 40
BOTH_WAYS = {"publish", "recompute"}


async def ask_many(client: httpx.AsyncClient, draw: random.Random) -> None:
    """Prompts of less than two grid steps over one budget, and others that go on from what they left."""
    beginnings = [[draw.randrange(8, 1024) for _ in range(draw.randint(GRID + 2, 2 * GRID - 1))] for _ in range(6)]
    await asyncio.gather(*(complete(client, tokens, max_tokens=1) for tokens in beginnings))
    await asyncio.gather(*(complete(client, [*tokens[: GRID + 1], 9, 10], max_tokens=2) for tokens in beginnings))


async def until_told(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """What a load's report has of the audit, when that has found the fault both ways. The workers' own counts come with heartbeats."""
    draw, load = random.Random(5), Client(client, await find_server(client, url), {}, PATIENCE_S)
    for _ in range(ROUNDS):
        await ask_many(client, draw)
        report: dict[str, Any] = (await audit_of(load))["audit"]
        if purposes(report) >= BOTH_WAYS and any(worker["violations"] for worker in report["workers"]):
            return report
    raise AssertionError(report)


def purposes(report: dict[str, Any]) -> set[str]:
    return {entry["purpose"] for entry in report["entries"]}


async def test_the_audit_tells_the_fault_and_names_the_prefill_worker() -> None:
    plan = with_fault(with_worker_settings(plan_own_cluster(None, 3, prefill=1, decode=1, threads=1), TIGHT), FAULT)
    log: list[str] = []
    cluster = LocalCluster(plan.specs, plan.url, lambda _, line: log.append(line))
    async with cluster, httpx.AsyncClient(base_url=plan.url, timeout=PATIENCE_S) as client:
        await cluster.ready(timeout_s=PATIENCE_S)
        assert {worker["info"]["policies"] for worker in (await client.get("/health")).json()["workers"]} == {REPRODUCTIONS[FAULT].policies}
        report = await until_told(client, plan.url)
        metrics = (await client.get("/metrics")).text
        told = await asyncio.to_thread(CliRunner().invoke, app, ["audit", "--url", plan.url], env={"COLUMNS": "200"})
    assert purposes(report) == BOTH_WAYS
    assert report["violations"] == len(report["entries"])
    for entry in report["entries"]:
        assert (entry["worker_id"], entry["role"]) == ("prefill-0", "prefill")
        assert 0 < entry["held"] < entry["claimed"], "a truncated state"
        assert "admitted" in entry["story"]
    first = report["entries"][0]
    line = f"publish: hashed as state@{first['claimed']} but holds state@{first['held']}; request {first['request_id']}"
    assert any(line in said for said in log)
    assert any(said.startswith("baton_state_audit_violations_total{") and not said.endswith(" 0") for said in metrics.splitlines())
    assert (told.exit_code, str(first["held"]) in told.output) == (1, True)
