"""``--reproduce``: which processes get the fault, and when there is none to get."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.main import app
from baton.reproduce import REPRODUCTIONS, Fault, with_fault
from baton.up import plan_cluster
from engine.policies import OURS, load_policies
from protocol.config import UpSettings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_is_told_and_there(fault: Fault) -> None:
    assert REPRODUCTIONS[fault].about
    assert load_policies(REPRODUCTIONS[fault].policies) != OURS


@pytest.mark.parametrize(
    ("fault", "whose"),
    [
        (Fault.PADDED_TAIL_AS_PREFILL, {"decode-0", "decode-1"}),
        (Fault.COLUMN_PUBLISHING, {"prefill-0", "decode-0", "decode-1"}),
    ],
)
def test_the_workers_that_have_the_fault_get_it_and_nobody_else(fault: Fault, whose: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    plan = with_fault(plan_cluster(UpSettings(prefill=1, decode=2, port=0), None, {}), fault)
    faulty = {spec.name for spec in plan.specs if "--policies" in spec.args}
    assert faulty == whose
    for spec in plan.specs:
        assert spec.environment == ({"PYTHONPATH": f"{ROOT}:/elsewhere"} if spec.name in faulty else {})


def test_without_a_checkout_it_is_refused(tmp_path: Path) -> None:
    plan = plan_cluster(UpSettings(port=0), None, {})
    with pytest.raises(ValueError, match="isn't there; faults are in a checkout"):
        with_fault(plan, Fault.PADDED_TAIL_AS_PREFILL, root=tmp_path)


@pytest.mark.parametrize("args", [("--url", "http://somewhere", "--reproduce", Fault.PADDED_TAIL_AS_PREFILL), ("--reproduce", "no-such")])
def test_the_option_is_for_a_cluster_of_its_own_and_for_faults_that_are_known(args: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, ["bench", "swe", *args])
    assert told.exit_code == 2
    assert "--reproduce" in told.stderr
