"""``--reproduce``: which processes get the fault, and when there is none to get."""

from __future__ import annotations

from pathlib import Path

import pytest

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
