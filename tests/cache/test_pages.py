"""Pages that the cache keeps: never written, never in the way, all back in the end; and never under a false name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.policies import Policies
from engine.prefix_cache.eviction import least_recently_used
from engine.prefix_cache.nodes import Why
from engine.prefix_cache.publishing import Claim, PublishView, publish_reached
from engine.request import SealedEvent
from engine.serving import flush_cache
from protocol.ids import new_epoch
from protocol.messages import FlushCache
from tests.cache.cache_kit import ROOMY, Watcher, cached, expected, family, one_by_one, plain_pages
from tests.engine.engine_kit import KERNELS, Drive, MakeCore, assert_whole, key, poison, prompt, request

TIGHT: dict[str, Any] = {"block_tokens": 4, "kv_blocks": 30, "snapshot_tokens": 8, "snapshot_slots": 5, "max_prefill_chunk": 8}


def core_with(make_core: MakeCore, policies: Policies, **config: Any) -> EngineCore:
    core = make_core(**config)
    return EngineCore(core.config, core.loaded, policies)


# --- copy-on-resume


@pytest.mark.skipif("native" not in KERNELS, reason="only the native kernels give the same bits for other chunks")
@pytest.mark.parametrize("speculation", [0, 3])
def test_what_is_gone_on_from_is_bit_for_bit_what_a_cold_run_would_hold(make_core: MakeCore, speculation: int) -> None:
    """Snapshot, KV and MTP KV, after owners and users wrote whatever they had to write around it: copy-on-resume."""
    core = make_core(kernels="native", speculation=speculation, **ROOMY)
    drive, watcher = Drive(core), Watcher(core)
    history = prompt(21)
    for turn in range(3):
        requests = [request(f"{turn}.{i}", (*history, *prompt(5 + i, i)), max_tokens=9, temperature=i * 0.5, seed=i) for i in range(3)]
        answers = drive.outputs(requests)
        history = (*requests[1].token_ids, *answers[1])
    assert {record.snapshot.why for record in watcher.resumes} >= {Why.OUTPUT, Why.PROMPT} or len(watcher.resumes) > 5
    assert len({record.claimed % 4 for record in watcher.resumes}) > 1, "within a block as well"
    for tokens, slot, blocks in watcher.states:
        true_slot, true_blocks = plain_pages(make_core, tokens, kernels="native", block_tokens=4, kv_blocks=60)
        assert torch.equal(slot, true_slot)
        assert_same_kv(blocks, true_blocks, len(tokens))


def assert_same_kv(blocks: torch.Tensor, true: torch.Tensor, tokens: int, block_tokens: int = 4, head_dim: int = 8) -> None:
    """At positions [0, tokens); MTP's index 0 holds nothing."""
    shape = (len(true), -1, block_tokens, head_dim)
    one, other = blocks.view(shape), true.view(shape)
    for position in range(1, tokens):
        block, offset = divmod(position, block_tokens)
        assert torch.equal(one[block, :, offset], other[block, :, offset]), position


def test_shared_pages_are_never_written(make_core: MakeCore) -> None:
    """While one request holds them, others come, resume, replay, are preempted and cancelled."""
    core = make_core(speculation=3, **TIGHT)
    drive = Drive(core)
    drive.outputs([request("first", prompt(40), max_tokens=2)])
    core.submit(request("holds", (*prompt(40), 5), origin="seal"))
    drive.run()
    held = next(event for event in drive.events if isinstance(event, SealedEvent))
    blocks, slot = core.pools.blocks.tensor[list(held.blocks)].clone(), core.pools.slots.tensor[held.slot].clone()
    for number in range(8):
        core.submit(request(number, (*prompt(40)[: 20 + 3 * number], *prompt(6, number)), max_tokens=20))
        drive.step()
        if number % 3 == 2:
            core.cancel(key(number))
    drive.run()
    assert torch.equal(core.pools.blocks.tensor[list(held.blocks)][:-1], blocks[:-1])
    assert torch.equal(core.pools.slots.tensor[held.slot], slot)
    core.release(key("holds"))
    assert_whole(core)


# --- never in the way


def test_a_full_cache_is_never_busy(make_core: MakeCore) -> None:
    """Whatever an empty engine would take at once, a full cache takes at once."""
    for size in (3, 9, 29):
        core = make_core(speculation=2, **TIGHT)
        drive = Drive(core)
        one_by_one(drive, [request(i, prompt(17, i), max_tokens=5) for i in range(12)])
        assert core.pools.blocks.num_free < 10
        assert core.load().free_blocks == 29
        assert core.reserve(request("big", prompt(4 * size), origin="remote", max_tokens=1)) is not None
        core.check_integrity()
        assert core.cancel(key("big"))
        assert_whole(core)


def test_cached_pages_put_nobody_out(make_core: MakeCore) -> None:
    core = make_core(speculation=3, **TIGHT | {"kv_blocks": 2 + 2 * 8})
    drive = Drive(core)
    one_by_one(drive, [request(f"old{i}", prompt(13, i + 5), max_tokens=3) for i in range(4)])
    requests = [request(i, prompt(9, i), max_tokens=20) for i in range(2)]
    assert drive.outputs(requests) == expected(make_core, requests)
    assert core.counters()["baton_preemptions_total"] == 0
    assert core.cache_stats().evicted_blocks > 0


@pytest.mark.parametrize("speculation", [0, 3])
def test_preemption_beside_a_cache_changes_no_token(make_core: MakeCore, speculation: int) -> None:
    core = make_core(speculation=speculation, **ROOMY | {"kv_blocks": 30})
    drive = Drive(core)
    requests = [request(i, prompt(22 + i, i), max_tokens=14) for i in range(5)]
    outputs = drive.outputs(requests, between=lambda _: poison(core))
    assert outputs == expected(make_core, requests)
    assert core.counters()["baton_preemptions_total"] > 0
    assert core.cache_stats().evicted_snapshots > 0


EXACT: dict[str, Any] = {"block_tokens": 4, "kv_blocks": 11, "snapshot_tokens": 64, "snapshot_slots": 4, "max_model_len": 64}
"""Room for ten blocks."""


def prefills(drive: Drive, *prompts: tuple[int, ...]) -> None:
    """For a peer, one after the other; the peer has fetched them."""
    for number, tokens in enumerate(prompts):
        drive.core.submit(request(f"{number} {len(drive.events)}", tokens, origin="seal"))
        drive.run()
        for sealed in [event for event in drive.events if isinstance(event, SealedEvent)]:
            drive.core.release(sealed.key)


def test_a_prompt_that_fits_exactly_goes_on_from_a_state_within_a_block(make_core: MakeCore) -> None:
    """The state's own partly filled block can't be given up while it is used, though the tree has the block of the same tokens filled."""
    for length in range(14, 41):
        drive = Drive(make_core(**EXACT))
        begins = prompt(10)
        prefills(drive, begins, (*begins, 5, 6, *prompt(5, 3)), (*begins, 5, 6, 9, *prompt(length - 13, 7)))
        assert_whole(drive.core)


def test_who_starts_first_may_take_pages_that_another_was_to_go_on_from(make_core: MakeCore) -> None:
    """Both are admitted in one plan, and together they fit exactly; the second one's hit shrinks to another state's."""
    drive = Drive(make_core(**EXACT))
    begins = prompt(10)
    prefills(drive, begins, (*begins, 5, 6))
    drive.core.submit(request("touches", (*begins, 20, 20, 20), origin="seal"))  # from now on the first state is the younger one
    drive.core.step()  # it is admitted, no more
    drive.core.cancel(key("touches"))
    for name, tokens in (("first", prompt(28, 9)), ("second", (*begins, 5, 6))):
        drive.core.submit(request(name, tokens, origin="seal"))
    drive.run()
    assert [type(drive.told[key(name)].endings[0]) for name in ("first", "second")] == [SealedEvent] * 2


def test_a_slot_for_the_state_is_given_up_for_one_that_saves_more(make_core: MakeCore) -> None:
    """One snapshot in all: a long prompt's stays, however many short ones pass, and goes when it is old."""
    core = make_core(**ROOMY | {"snapshot_slots": 1})
    drive = Drive(core)
    drive.outputs([request("long", prompt(120), max_tokens=1)])
    for number in range(4):
        drive.outputs([request(f"short{number}", prompt(5, number), max_tokens=1)])
    assert core.cache_stats().unworthy_snapshots > 0
    drive.outputs([request("again", prompt(120), max_tokens=1)])
    assert cached(drive, "again") == 119


def test_least_recently_used_is_there_for_comparison(make_core: MakeCore) -> None:
    core = core_with(make_core, Policies(score=least_recently_used), **ROOMY | {"snapshot_slots": 1})
    drive = Drive(core)
    for name, tokens in (("long", prompt(120)), ("short", prompt(5)), ("again", prompt(120))):
        drive.outputs([request(name, tokens, max_tokens=1)])
    assert cached(drive, "again") == 0


# --- flushing


def test_a_flush_forgets_everything_and_hurts_nobody(make_core: MakeCore) -> None:
    drive = Drive(make_core(speculation=3, **ROOMY))
    requests = [request(i, each, max_tokens=9) for i, each in enumerate(family(30, (4, 9, 20)))]
    truth = expected(make_core, requests)
    for each in requests:
        drive.core.submit(each)
    for _ in range(5):
        drive.step()
    assert drive.core.flush_cache() > 0
    drive.core.check_integrity()
    assert (drive.core.cache_stats().blocks, drive.core.cache_stats().snapshots) == (0, 0)
    drive.run()
    assert [drive.told[each.key].tokens for each in requests] == truth
    assert drive.core.cache_stats().blocks == 0, "who ran then leaves nothing"
    assert_whole(drive.core)
    again = [request(f"again{i}", each.token_ids, max_tokens=9) for i, each in enumerate(requests)]
    assert one_by_one(drive, again) == truth
    assert drive.core.cache_stats().blocks > 0


def test_a_flush_tells_what_came_free_and_what_is_still_used(make_core: MakeCore) -> None:
    core = make_core(**ROOMY)
    drive, epoch = Drive(core), new_epoch()
    drive.outputs([request("old", prompt(21, 1), max_tokens=1)])
    idle = core.pools.blocks.num_idle
    core.submit(request("runs", prompt(100), max_tokens=2))
    for _ in range(3):
        drive.step()
    told = flush_cache(core, FlushCache(epoch=epoch, number=1), epoch)
    assert (told.freed_blocks, told.kept_blocks) == (idle, 48 // 4)
    assert told.freed_snapshots > 0
    assert told.kept_snapshots == 0
    drive.run()
    assert_whole(core)


# --- never under a false name


def columns(view: PublishView) -> Sequence[Claim]:
    """Report A: whatever the running slot holds is published as each column that the step passed."""
    passed = range(view.first // view.grid + 1, view.computed // view.grid + 1)
    return [*publish_reached(view), *(Claim(column * view.grid, view.slot, Why.GRID) for column in passed)]


def test_a_claim_that_the_tag_contradicts_is_refused_counted_and_told(make_core: MakeCore, caplog: pytest.LogCaptureFixture) -> None:
    core = core_with(make_core, Policies(publish=columns), **ROOMY | {"max_prefill_chunk": 64})
    drive, watcher = Drive(core), Watcher(core)
    requests = [request(i, each, max_tokens=3) for i, each in enumerate(family(50, (7, 7)))]
    assert one_by_one(drive, requests) == expected(make_core, requests)
    assert [(lie.claimed, lie.held, lie.key) for lie in watcher.lies[:3]] == [(16, 57, key(0)), (32, 57, key(0)), (48, 57, key(0))]
    assert core.counters()["baton_state_audit_violations_total"] == len(watcher.lies) > 0
    assert "admitted with" in watcher.lies[0].story
    assert "state@57" in caplog.text


@pytest.mark.parametrize(("policies", "true"), [(Policies(), True), (Policies(publish=columns, enforce_tags=False), False)])
def test_believed_lies_are_another_state(make_core: MakeCore, policies: Policies, true: bool) -> None:
    """What the audit is for: without it the second of a family goes on from a state that isn't its own, silently."""
    core = core_with(make_core, policies, **ROOMY | {"max_prefill_chunk": 64})
    drive = Drive(core)
    first, second = family(50, (7, 7))
    for name, tokens in (("first", first), ("second", second)):
        core.submit(request(name, tokens, origin="seal"))
        drive.run()
    sealed = next(event for event in drive.events if isinstance(event, SealedEvent) and event.key == key("second"))
    expected_slot, _ = plain_pages(make_core, second, block_tokens=4)
    assert torch.allclose(core.pools.slots.tensor[sealed.slot], expected_slot, rtol=1e-4, atol=1e-5) == true
    assert (core.counters()["baton_state_audit_violations_total"] == 0) == true


def test_a_snapshot_that_lost_its_truth_is_dropped_and_the_next_one_taken(make_core: MakeCore) -> None:
    core = make_core(**ROOMY)
    drive = Drive(core)
    first, second = (request(i, prompt(50), max_tokens=3) for i in range(2))
    drive.outputs([first])
    tags = core.pools.slots.tags
    tags[tags.index(49)] = 12
    core.submit(second)
    drive.run()
    assert drive.told[key(1)].tokens == drive.told[key(0)].tokens
    assert cached(drive, 1) == 48
    assert core.counters()["baton_state_audit_violations_total"] == 1
    assert_whole(core)
