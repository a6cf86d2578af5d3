"""The deep audit on states that are true, and on states that are not what they are said to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.audit import AuditLog
from engine.core import EngineCore
from engine.deep_audit import BUSY_STEPS, DeepAudit
from engine.prefix_cache.nodes import Node, Salt, Snapshot, Why
from engine.prefix_cache.observer import ResumeRecord
from engine.request import SealedEvent
from tests.engine.engine_kit import Drive, MakeCore, key, prompt, request

LENGTH = 22
Hit = tuple[EngineCore, ResumeRecord]


@pytest.fixture
def hit(make_core: MakeCore) -> Hit:
    """A state and KV after LENGTH tokens, computed in chunks, and what a request that goes on from it would tell."""
    core = make_core(max_prefill_chunk=5)
    drive = Drive(core)
    core.submit(request("first", prompt(LENGTH), origin="seal"))
    drive.run()
    (sealed,) = drive.told[key("first")].endings
    assert isinstance(sealed, SealedEvent)
    node = Node(None, (), 0, 0)
    snapshot = Snapshot(node=node, tail=(), position=LENGTH, slot=sealed.slot, partial=None, why=Why.PROMPT)
    record = ResumeRecord(
        key=key("second"),
        story="a story",
        step=7,
        claimed=LENGTH,
        held=LENGTH,
        snapshot=snapshot,
        tokens=prompt(LENGTH),
        blocks=sealed.blocks,
        salt=Salt("w", None, "float32", None),
    )
    return core, record


def audited(hit: Hit, *, max_tokens: int = 64, busy: bool = False) -> tuple[DeepAudit, AuditLog]:
    core, record = hit
    found = AuditLog()
    audit = DeepAudit(core.loaded.model, core.pools, found, sample=1.0, max_tokens=max_tokens)
    audit.resumed(record)
    for _ in range(LENGTH * BUSY_STEPS):
        if audit.has_work():
            audit.work(busy=busy)
    assert not audit.has_work()
    return audit, found


@pytest.mark.parametrize("busy", [False, True])
def test_a_true_state_passes(hit: Hit, busy: bool) -> None:
    audit, found = audited(hit, busy=busy)
    assert audit.counters()["baton_deep_audit_passed_total"] == 1
    assert audit.counters()["baton_deep_audit_tokens_total"] == LENGTH
    assert 0 <= audit.largest_difference < 1e-5
    assert found.total == 0


def _other_state(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.slots.part("ssm.1")[record.snapshot.slot] += 0.01


def _other_window(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.slots.part("conv.0")[record.snapshot.slot] = core.pools.slots.part("conv.0")[record.snapshot.slot].roll(1, 0)


def _other_tail(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.slots.hidden[record.snapshot.slot] *= 1.1


def _no_number(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.slots.part("ssm.0")[record.snapshot.slot, 0, 0, 0] = float("nan")


def _other_keys(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.kv(0)[record.blocks[1]] += 0.1


def _other_mtp_keys(core: EngineCore, record: ResumeRecord) -> None:
    core.pools.kv(1)[record.blocks[-1], :, :, 1] += 0.1  # position 21, the last one


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (_other_state, "ssm.1"),
        (_other_window, "conv.0"),
        (_other_tail, "hidden"),
        (_no_number, "ssm.0"),
        (_other_keys, "kv.0"),
        (_other_mtp_keys, "mtp_kv.0"),
    ],
)
def test_a_state_that_is_not_what_it_claims_is_found(hit: Hit, damage: Callable[[EngineCore, ResumeRecord], None], part: str) -> None:
    damage(*hit)
    audit, found = audited(hit)
    assert audit.counters()["baton_deep_audit_failed_total"] == 1
    (violation,) = found.take()
    assert str(violation).startswith(f"recompute: hashed as state@{LENGTH} but holds another state ({part} differs by ")
    assert "request second, step 7" in str(violation)
    assert violation.story == "a story"
    assert found.take() == []


def test_a_cache_that_held_another_state_forgets_everything(make_core: MakeCore) -> None:
    """Nobody else goes on from it, nor from what was computed from it."""
    core = make_core(audit_sample=1.0)
    drive = Drive(core)
    drive.outputs([request("first", prompt(LENGTH), max_tokens=1)])
    (slot,) = (slot for slot, tag in enumerate(core.pools.slots.tags) if tag == LENGTH - 1)
    core.pools.slots.part("ssm.1")[slot] += 0.01
    drive.outputs([request("second", prompt(LENGTH), max_tokens=1)])
    drive.run()
    assert core.counters()["baton_deep_audit_failed_total"] == 1
    assert core.cached(prompt(LENGTH)).state_tokens == 0
    truth = Drive(make_core(prefix_cache=False)).outputs([request("third", prompt(LENGTH), max_tokens=5)])
    assert drive.outputs([request("third", prompt(LENGTH), max_tokens=5)]) == truth


def test_what_lies_behind_the_position_does_not_matter(hit: Hit) -> None:
    core, record = hit
    core.pools.blocks.view(0)[record.blocks[-1], :, :, 2:] = float("nan")  # 22 tokens in blocks of 4
    core.pools.blocks.view(1)[record.blocks[0], :, :, 0] = float("nan")  # MTP's index 0
    _, found = audited(hit)
    assert found.total == 0


def test_hits_during_an_audit_and_long_ones_are_skipped(hit: Hit) -> None:
    core, record = hit
    audit = DeepAudit(core.loaded.model, core.pools, AuditLog(), sample=1.0, max_tokens=64)
    audit.resumed(record)
    audit.resumed(record)
    assert audit.counters()["baton_deep_audit_skipped_total"] == 1
    audit, _ = audited(hit, max_tokens=LENGTH - 1)
    assert audit.counters()["baton_deep_audit_skipped_total"] == 1
    assert audit.counters()["baton_deep_audit_passed_total"] == 0


def test_a_sample_is_its_share_of_the_hits(hit: Hit) -> None:
    core, record = hit
    audit = DeepAudit(core.loaded.model, core.pools, AuditLog(), sample=0.1, max_tokens=1)
    for _ in range(100):
        audit.resumed(record)
    assert 10 <= audit.counters()["baton_deep_audit_skipped_total"] <= 11


def test_its_own_failure_ends_the_audit_and_nothing_else(hit: Hit, monkeypatch: pytest.MonkeyPatch) -> None:
    core, record = hit
    audit = DeepAudit(core.loaded.model, core.pools, AuditLog(), sample=1.0, max_tokens=64)
    audit.resumed(record)
    with monkeypatch.context() as patched:
        patched.setattr(type(core.loaded.model), "forward", lambda *_: torch.zeros(1) + torch.zeros(0, 3, 2))
        audit.work(busy=False)
    assert not audit.has_work()
    assert audit.counters()["baton_deep_audit_errors_total"] == 1
    audit.resumed(record)
    audit.work(busy=False)
    assert audit.counters()["baton_deep_audit_passed_total"] == 1
