"""The audit at work in an engine: hits computed again and found equal, and report A's poison found twice."""

from __future__ import annotations

import pytest

from engine.audit import Violation
from engine.core import EngineCore
from engine.policies import Policies
from engine.request import EngineRequest
from tests.cache.cache_kit import ROOMY, cached, expected, family, one_by_one
from tests.engine.engine_kit import Drive, MakeCore, key, prompt, request
from tests.reproductions.column_publishing import BELIEVED, REFUSED


def counter(core: EngineCore, name: str) -> float:
    return core.counters()[f"baton_{name}_total"]


def test_every_hit_computed_again_is_equal(make_core: MakeCore) -> None:
    core = make_core(**ROOMY, speculation=3, audit_sample=1.0)
    drive = Drive(core)
    prompts = [request(number, tokens, max_tokens=5) for number, tokens in enumerate(family(37, (9, 5, 20, 1)))]
    assert one_by_one(drive, prompts) == expected(make_core, prompts)
    hits = sum(cached(drive, number) > 0 for number in range(4))
    assert hits >= 2
    assert counter(core, "deep_audit_passed") == hits
    assert core.audit.total == 0
    assert core.counters()["baton_deep_audit_largest_difference"] < 1e-4


def test_an_audit_goes_on_beside_requests_and_keeps_none_of_them_waiting(make_core: MakeCore) -> None:
    core = make_core(**ROOMY, audit_sample=1.0)
    drive = Drive(core)
    shared = family(60, (4, 4))
    one_by_one(drive, [request("first", shared[0], max_tokens=1)])
    core.submit(request("hit", shared[1], max_tokens=60))
    passed_at = ended_at = None
    for number in range(200):
        if not core.has_work():
            break
        drive.step()
        if passed_at is None and counter(core, "deep_audit_passed"):
            passed_at = number
        if ended_at is None and drive.told[key("hit")].endings:
            ended_at = number
    assert passed_at is not None
    assert ended_at is not None
    assert passed_at < ended_at, "in between the steps, not after them"
    assert counter(core, "steps") < 70, "the request took the steps that it needs"


def third() -> EngineRequest:
    return request("third", (*prompt(27, seed=27)[:18], 5), max_tokens=20, temperature=1.0, seed=1)


def poisoned(make_core: MakeCore, policies: Policies) -> tuple[EngineCore, list[int], list[Violation]]:
    """Two prompts share a budget of 40: the second's first chunk ends at 10, its next one crosses 16. A third begins like it."""
    loaded = make_core().loaded
    config = make_core(block_tokens=4, snapshot_tokens=16, kv_blocks=100, step_tokens=40, max_prefill_chunk=40, audit_sample=1.0).config
    core = EngineCore(config, loaded, policies)
    drive = Drive(core)
    for name, length in (("first", 30), ("second", 27)):
        core.submit(request(name, prompt(length, seed=length), origin="seal"))
    drive.run()
    core.release(key("first"))
    core.release(key("second"))
    (output,) = drive.outputs([third()])
    drive.run()
    return core, output, core.audit.take()


def truth(make_core: MakeCore) -> list[int]:
    return expected(make_core, [third()])[0]


def test_poison_is_refused_and_told(make_core: MakeCore) -> None:
    core, output, (violation,) = poisoned(make_core, REFUSED)
    assert str(violation) == "publish: hashed as state@16 but holds state@10; request second, step 2"
    assert "seal, 27 tokens" in violation.story
    assert output == truth(make_core)
    assert counter(core, "state_audit_violations") == 1
    assert counter(core, "deep_audit_failed") == 0


def test_poison_that_got_in_is_found_by_its_numbers(make_core: MakeCore) -> None:
    core, output, found = poisoned(make_core, BELIEVED)
    assert output != truth(make_core), "the fault is real"
    by_tag = [violation for violation in found if violation.purpose == "publish"]
    (by_numbers,) = [violation for violation in found if violation.purpose == "recompute"]
    assert (by_tag[0].claimed, by_tag[0].held) == (16, 10)
    assert (by_numbers.claimed, by_numbers.held, by_numbers.request_id) == (16, 10, "third")
    assert "differs by" in by_numbers.detail
    assert counter(core, "deep_audit_failed") == 1
    assert counter(core, "state_audit_violations") == len(found)


def test_settings_that_make_no_sense_are_named(make_core: MakeCore) -> None:
    with pytest.raises(ValueError, match="audit_sample=2"):
        make_core(audit_sample=2)
    with pytest.raises(ValueError, match="need prefix_cache"):
        make_core(audit_sample=0.5, prefix_cache=False)
