"""Report A's fault in a running worker: the audit tells it, by tags at once and by numbers soon after, to whoever asks the router."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from baton.main import app
from demo import CHECKPOINT
from tests.system.cluster_kit import Cluster, complete

GRID = 16
TIGHT = ("--snapshot-tokens", str(GRID), "--step-tokens", "40", "--max-prefill-chunk", "40", "--block-tokens", "8", "--audit-sample", "1.0")
BELIEVED = "tests.reproductions.column_publishing:BELIEVED"
ROUNDS = 40


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A router and one worker that does everything, with the fault."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    cluster = Cluster(CHECKPOINT, tmp_path)
    cluster.start_router()
    cluster.start_worker("decode", "d", "--speculation", "3", "--policies", BELIEVED, *TIGHT)
    try:
        cluster.until_ready(0, 1)
        yield cluster
    finally:
        cluster.stop_all()


async def ask_many(cluster: Cluster, draw: random.Random) -> None:
    """Prompts of less than two grid steps over one budget, and others that go on from what they left."""
    beginnings = [[draw.randrange(8, 1024) for _ in range(draw.randint(GRID + 2, 2 * GRID - 1))] for _ in range(6)]
    async with cluster.client() as client:
        await asyncio.gather(*(complete(client, tokens, max_tokens=1) for tokens in beginnings))
        await asyncio.gather(*(complete(client, [*tokens[: GRID + 1], 9, 10], max_tokens=2) for tokens in beginnings))


def fetch_report(cluster: Cluster) -> dict[str, Any]:
    report: dict[str, Any] = httpx.get(f"{cluster.url}/audit", timeout=10).json()
    return report


def count_violations(cluster: Cluster) -> float:
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    (counted,) = [line for line in metrics.splitlines() if line.startswith("baton_state_audit_violations_total{")]
    return float(counted.rpartition(" ")[2])


def purposes(report: dict[str, Any]) -> set[str]:
    return {entry["purpose"] for entry in report["entries"]}


def test_the_audit_tells_the_fault_on_a_running_cluster(cluster: Cluster) -> None:
    draw, report = random.Random(5), fetch_report(cluster)
    for _ in range(ROUNDS):
        if purposes(report) == {"publish", "recompute"}:
            break
        asyncio.run(ask_many(cluster, draw))
        report = fetch_report(cluster)
    assert purposes(report) == {"publish", "recompute"}
    assert report["violations"] == len(report["entries"])
    for entry in report["entries"]:
        assert 0 < entry["held"] < entry["claimed"], "a truncated state"
        assert "admitted" in entry["story"]
    first = report["entries"][0]
    line = f"publish: hashed as state@{first['claimed']} but holds state@{first['held']}; request {first['request_id']}"
    assert line in cluster.processes["d"].text()
    until = time.monotonic() + 60
    while count_violations(cluster) == 0:  # counters come with the worker's next heartbeat
        assert time.monotonic() < until
        time.sleep(0.1)
    told = CliRunner().invoke(app, ["audit", "--url", cluster.url], env={"COLUMNS": "200"})
    assert told.exit_code == 1
    assert str(first["held"]) in told.output
