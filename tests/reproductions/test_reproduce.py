"""``--reproduce``: which processes get the fault, and when there is none to get."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from baton.cluster import LocalCluster
from baton.main import app
from baton.own_cluster import plan_own_cluster
from baton.reproduce import ABOUT, POLICIES, Fault, with_fault
from baton.up import plan_cluster
from engine.policies import OURS, load_policies
from protocol.config import UpSettings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_is_told_and_there(fault: Fault) -> None:
    assert ABOUT[fault]
    assert load_policies(POLICIES[fault]) != OURS


def test_decode_workers_get_the_fault_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    plan = with_fault(plan_cluster(UpSettings(prefill=1, decode=2, port=0), None, {}), Fault.PADDED_TAIL_AS_PREFILL)
    faulty = {spec.name for spec in plan.specs if "--policies" in spec.args}
    assert faulty == {"decode-0", "decode-1"}
    for spec in plan.specs:
        assert spec.environment == ({"PYTHONPATH": f"{ROOT}:/elsewhere"} if spec.name in faulty else {})


def test_without_a_checkout_it_is_refused(tmp_path: Path) -> None:
    plan = plan_cluster(UpSettings(port=0), None, {})
    with pytest.raises(ValueError, match="isn't there; faults are in a checkout"):
        with_fault(plan, Fault.PADDED_TAIL_AS_PREFILL, root=tmp_path)


async def test_a_cluster_with_the_fault_serves_and_says_so() -> None:
    plan = with_fault(plan_own_cluster(None, 3, prefill=0, decode=1, threads=1), Fault.PADDED_TAIL_AS_PREFILL)
    log: list[str] = []
    async with LocalCluster(plan.specs, plan.url, lambda _, line: log.append(line)) as cluster, httpx.AsyncClient() as client:
        await cluster.ready(timeout_s=90.0)
        (worker,) = (await client.get(f"{plan.url}/health")).json()["workers"]
    assert worker["degraded"]
    assert worker["info"]["policies"] == POLICIES[Fault.PADDED_TAIL_AS_PREFILL]
    assert any(f"POLICIES FROM {POLICIES[Fault.PADDED_TAIL_AS_PREFILL]}" in line for line in log)


@pytest.mark.parametrize("args", [("--url", "http://somewhere", "--reproduce", Fault.PADDED_TAIL_AS_PREFILL), ("--reproduce", "no-such")])
def test_the_option_is_for_a_cluster_of_its_own_and_for_faults_that_are_known(args: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, ["bench", "swe", *args])
    assert told.exit_code == 2
    assert "--reproduce" in told.stderr
