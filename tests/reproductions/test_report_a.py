"""Report A on the real planner, scheduler and cache: the fault is caught in the act, and ours has none to catch.

Attention block 16, state grid 1600, K = 3. The full number of schedules is for ``scripts/experiment_report_a.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.policies import OURS, Policies
from engine.request import EngineRequest, SealedEvent
from protocol.ids import RequestId, RequestKey
from tests.reproductions.column_publishing import BELIEVED, REFUSED
from tests.reproductions.grid_schedules import OFFSETS, Arrangement, Lie, Oracle, columns, make_core, ours, run_schedules
from tests.reproductions.model_free import ModelFreeCore

FEW = 10
OTHERS = (3000, 3000, 8192 - 6000 - 364)
"""Prompts that leave 364 tokens of the first step's budget."""


def run_prompts(core: ModelFreeCore, prompts: Sequence[tuple[int, ...]], name: str = "prompt") -> dict[str, SealedEvent]:
    """Prefills that come together, to their end. Their pages stay theirs."""
    for number, tokens in enumerate(prompts):
        core.submit(EngineRequest(key=RequestKey(RequestId(f"{name}-{number}"), 0), token_ids=tokens, origin="seal"))
    events = [event for _ in range(10) if core.has_work() for event in core.step()]
    return {event.key.request_id: event for event in events if isinstance(event, SealedEvent)}


def the_schedule(policies: Policies) -> tuple[ModelFreeCore, Oracle]:
    core = make_core(policies, "soft", 8192, max_running=8)
    oracle = Oracle(core)
    core.observe(oracle)
    sealed = run_prompts(core, [(family,) * length for family, length in enumerate((*OTHERS, 2002), start=1)])
    assert [event.position for event in sealed.values()] == [*OTHERS, 2002]
    return core, oracle


def test_364_of_2002_tokens_would_be_published_as_1600_and_are_refused() -> None:
    core, oracle = the_schedule(REFUSED)
    assert not oracle.lies
    (violation,) = core.audit.take()
    assert str(violation) == "publish: hashed as state@1600 but holds state@364; request prompt-3, step 2"
    assert "seal, 2002 tokens" in violation.story
    assert core.counters()["baton_state_audit_violations_total"] == 1
    assert core.cached((4,) * 2000).state_tokens == 0, "nothing is found at 1600"


def test_364_of_2002_tokens_believed_poison_whoever_goes_on_from_them() -> None:
    core, oracle = the_schedule(BELIEVED)
    assert oracle.lies == [Lie(claimed=1600, held=364, purpose="publish")]
    assert core.counters()["baton_state_audit_violations_total"] == 1, "seen all the same"
    victim = run_prompts(core, [(4,) * 1700 + (5,) * 100], name="victim")
    gone_on_from, spread = oracle.lies[1:]
    assert gone_on_from == Lie(claimed=1600, held=364, purpose="resume")
    assert spread == Lie(claimed=1800, held=564, purpose="publish"), "and what it leaves is poisoned in turn"
    assert core.held(victim["victim-0"].slot) == 364 + 200, "1800 tokens, of which the state has seen 564"


def test_the_same_schedule_with_ours() -> None:
    core, oracle = the_schedule(OURS)
    assert not oracle.lies
    assert core.audit.total == 0
    assert core.cached((4,) * 2000).state_tokens == 1600


@pytest.mark.parametrize("partial_hits", [True, False])
@pytest.mark.parametrize("policy", ["strict", "soft"])
def test_random_schedules_with_ours(policy: str, partial_hits: bool) -> None:
    published = resumed = 0
    for offset in OFFSETS:
        arrangement = Arrangement("strict" if policy == "strict" else "soft", offset, partial_hits)
        outcome = run_schedules(arrangement, FEW, ours(arrangement))
        assert not outcome.lies, [str(lie) for lie in outcome.lies]
        assert outcome.refused == 0
        published, resumed = published + outcome.published, resumed + outcome.resumed
    assert published > FEW * len(OFFSETS)
    assert resumed > FEW * len(OFFSETS), "otherwise nothing was at stake"


@pytest.mark.parametrize(("offset", "partial_hits"), [(331, True), (2531, False)])
def test_random_schedules_with_the_fault(offset: int, partial_hits: bool) -> None:
    arrangement = Arrangement("soft", offset, partial_hits)
    believed = run_schedules(arrangement, FEW, columns(arrangement, believed=True))
    assert believed.poisoned_schedules > FEW // 3
    assert all(lie.held is not None and lie.held < lie.claimed for lie in believed.lies), "truncated states"
    refused = run_schedules(arrangement, FEW, columns(arrangement, believed=False))
    assert refused.refused > 0
    assert not refused.lies
