"""What the engine refuses, what it survives, and how it shares its room."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.admission import MAX_OVERTAKEN
from engine.core import EngineCore, LoadedModel
from engine.request import FailedEvent, FinishedEvent, ReadyEvent, StartedEvent
from engine.runner import Model
from tests.engine.engine_kit import Drive, MakeCore, assert_whole, key, prompt, request, write_checkpoint


class Wrapped:
    """The real model, with something done to what it gives."""

    def __init__(self, model: Model) -> None:
        self.inner = model
        self.fail_at = -1
        self.calls = 0
        self.nan_token = -1
        self.mtp_fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: Any, pools: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of luck")
        hidden = self.inner.forward(batch, pools)
        return hidden.masked_fill((batch.token_ids == self.nan_token)[:, None], float("nan"))

    def mtp_write_kv(self, *args: Any) -> None:
        if self.mtp_fails:
            raise RuntimeError("out of luck")
        self.inner.mtp_write_kv(*args)


def wrapped(make_core: MakeCore, **config: Any) -> tuple[EngineCore, Wrapped]:
    core = make_core(**config)
    model = Wrapped(core.loaded.model)
    return EngineCore(core.config, LoadedModel(model, core.loaded.info)), model


# --- refused, with the numbers


def test_requests_that_can_never_run_are_refused_with_the_numbers(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=6, block_tokens=4, max_model_len=40)
    cases: list[tuple[Any, str]] = [
        (request("a", ()), "no token"),
        (request("a", (3, 40)), "vocabulary 0..39"),
        (request("a", (-1,)), "vocabulary 0..39"),
        (request("a", prompt(30), max_tokens=11), "30 prompt \\+ 11 output tokens exceed max_model_len=40"),
        (request("a", prompt(12), max_tokens=10), "need 6 KV blocks, the pool has 5"),
        (request("a", prompt(21), origin="seal"), "need 6 KV blocks, the pool has 5"),
        (request("a", prompt(4), stop_token_ids=[40]), "stop_token_ids"),
        (request("a", prompt(4), origin="remote"), "reserve"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            core.submit(wrong)
    for wrong, message in ((request("a", prompt(1), origin="remote"), "one token"), (request("a", prompt(4)), "local")):
        with pytest.raises(ValueError, match=message):
            core.reserve(wrong)
    core.submit(request("twice", prompt(12), max_tokens=9))
    with pytest.raises(ValueError, match="twice#0 is already here"):
        core.submit(request("twice", prompt(2)))
    assert core.cancel(key("twice"))
    assert_whole(core)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 129}, "max_model_len=129"),
        ({"state_slots": 5, "speculation": 3}, "state_slots=5 .* needs 6"),
        ({"kv_blocks": None, "kv_bytes": 1000}, "kv_bytes=1000"),
        ({"mtp": False, "speculation": 1}, "speculation=1 needs"),
    ],
)
def test_impossible_settings_name_the_key(make_core: MakeCore, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_core(**config)


def test_pools_get_room_for_all_that_may_run(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=None, max_running=3, max_model_len=50, speculation=2, block_tokens=8)
    assert (core.capacity.num_blocks, core.capacity.num_slots) == (3 * 7 + 1, 3 * 4 + 1 + 8 * 3)


def test_a_model_without_mtp_serves_without_drafts(tmp_path: Any, make_core: MakeCore) -> None:
    """And the same weights without the module give the same tokens: MTP never touches them."""
    requests = [request(n, prompt(n), max_tokens=8) for n in (1, 6, 11)]
    without = MakeCore(write_checkpoint(tmp_path, mtp=False))(speculation=0)
    assert not without.model_info.has_mtp
    assert [part.name for part in without.regions[0].parts] == ["kv.0"]
    assert Drive(without).outputs(requests) == Drive(make_core(mtp=False)).outputs(requests)


def page(core: EngineCore, block: int) -> memoryview:
    region = core.regions[0]
    return region.memory[block * region.page_bytes : (block + 1) * region.page_bytes]


# --- failures are one request's, or one step's, never the engine's


def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(make_core: MakeCore) -> None:
    core, model = wrapped(make_core, speculation=3)
    drive = Drive(core)
    for n in (3, 9):
        core.submit(request(n, prompt(n), max_tokens=9))
    model.fail_at = 4
    drive.run()
    for n in (3, 9):
        (ending,) = drive.told[key(n)].endings
        assert isinstance(ending, FailedEvent)
        assert ending.message == "RuntimeError: out of luck"
    assert_whole(core)
    again = [request("again", prompt(9), max_tokens=9)]
    assert drive.outputs(again) == Drive(make_core()).outputs(again)


def test_a_failed_prefill_keeps_its_pages_until_its_hand_off_is_over(make_core: MakeCore) -> None:
    """Invariant 9: blocks that were offered may be under a send when a later chunk fails."""
    core, model = wrapped(make_core, max_prefill_chunk=16)
    drive = Drive(core)
    core.submit(request("sealing", prompt(40), origin="seal"))
    model.fail_at = 2
    drive.run()
    (ready,) = [event for event in drive.events if isinstance(event, ReadyEvent)]
    assert [type(event) for event in drive.told[key("sealing")].endings] == [FailedEvent]
    offered = [bytes(page(core, block)) for block in ready.blocks]
    core.submit(request("other", prompt(30), max_tokens=5))
    drive.run()
    assert [bytes(page(core, block)) for block in ready.blocks] == offered
    assert core.load().held_for_peers == 1
    assert core.cancel(key("sealing"))
    assert_whole(core)


def test_blocks_without_mtp_kv_are_never_offered(make_core: MakeCore) -> None:
    core, model = wrapped(make_core)
    drive = Drive(core)
    model.mtp_fails = True
    core.submit(request("sealing", prompt(40), origin="seal"))
    drive.run()
    assert [type(event) for event in drive.told[key("sealing")].endings] == [FailedEvent]
    assert not any(isinstance(event, ReadyEvent) for event in drive.events)
    assert core.cancel(key("sealing"))
    assert_whole(core)


def test_logits_without_a_token_fail_only_their_request(make_core: MakeCore) -> None:
    good, bad = request("good", prompt(8), max_tokens=9), request("bad", (7,) * 6, max_tokens=9)
    expected = Drive(make_core()).outputs([good])[0]
    core, model = wrapped(make_core, speculation=2)
    assert 7 not in (*good.token_ids, *expected)
    model.nan_token = 7
    drive = Drive(core)
    for each in (good, bad):
        core.submit(each)
    drive.run()
    assert drive.told[good.key].tokens == expected
    (ending,) = drive.told[bad.key].endings
    assert isinstance(ending, FailedEvent)
    assert "LogitsError" in ending.message
    assert core.counters()["baton_failed_requests_total"] == 1
    assert_whole(core)


@pytest.mark.parametrize("name", ["decoding", "sealing"])
def test_a_state_that_is_not_what_it_claims_is_refused_counted_and_told(
    make_core: MakeCore, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Invariant 2: somebody moved h(10) under a request that believes in another position."""
    core = make_core(max_prefill_chunk=4)
    drive = Drive(core)
    core.submit(request("good", prompt(4), max_tokens=20))
    core.submit(request("decoding", prompt(11), max_tokens=20))
    core.submit(request("sealing", prompt(20), origin="seal"))
    for _ in range(3):
        drive.step()
    wrong = {"decoding": 10, "sealing": 12}[name]
    core.pools.slots.tags[core.pools.slots.tags.index(wrong)] = wrong - 2
    drive.run()
    (ending,) = drive.told[key(name)].endings
    assert isinstance(ending, FailedEvent)
    assert re.fullmatch(rf"StateAuditError: extend: slot \d+ is claimed to hold h\({wrong}\) but its tag is {wrong - 2}", ending.message)
    assert core.counters()["baton_state_audit_violations_total"] == 1
    assert "story" in caplog.text
    assert "admitted with" in caplog.text
    assert isinstance(drive.told[key("good")].endings[0], FinishedEvent)


# --- room is shared


def test_a_short_request_passes_a_long_one_that_does_not_fit(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=21, block_tokens=4)
    drive = Drive(core)
    core.submit(request("running", prompt(40), max_tokens=30))
    drive.step()
    core.submit(request("long", prompt(60), max_tokens=3))
    core.submit(request("short", prompt(6), max_tokens=3))
    for _ in range(8):
        drive.step()
    assert drive.told[key("short")].endings
    assert key("long") not in drive.told
    drive.run()
    assert len(drive.told[key("long")].tokens) == 3


def test_the_long_one_is_overtaken_only_so_often(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=21, block_tokens=4, max_running=2)
    drive = Drive(core)
    core.submit(request("first", prompt(6), max_tokens=2))
    drive.step()
    core.submit(request("long", prompt(70), max_tokens=3))
    finished_before = 0

    def feed(step: int) -> None:
        nonlocal finished_before
        if key("long") not in drive.told:
            finished_before = sum(bool(told.endings) for told in drive.told.values())
            core.submit(request(f"short{step}", prompt(6, step), max_tokens=2))

    drive.run(between=feed, max_steps=400)
    assert len(drive.told[key("long")].tokens) == 3
    assert finished_before <= MAX_OVERTAKEN + 2
    assert any(isinstance(event, StartedEvent) and event.key == key("long") for event in drive.events)


def test_no_reservation_overtakes_for_ever_either(make_core: MakeCore) -> None:
    core = make_core(kv_blocks=21, block_tokens=4)
    core.submit(request("running", prompt(40), max_tokens=30))
    core.step()
    core.submit(request("long", prompt(60), max_tokens=3))
    taken = 0
    for number in range(MAX_OVERTAKEN + 5):
        taken += core.reserve(request(f"d{number}", prompt(3), origin="remote", max_tokens=1)) is not None
        core.cancel(key(f"d{number}"))
    assert taken == MAX_OVERTAKEN


def test_everyone_goes_on_when_the_budget_is_one_window(make_core: MakeCore) -> None:
    """F7: a long prompt beside steady decodes at the tightest budget; nobody waits longer than the others take turns."""
    core = make_core(speculation=3, step_tokens=4, max_prefill_chunk=64)
    drive = Drive(core)
    for n in (3, 4, 5):
        core.submit(request(n, prompt(n), max_tokens=40))
    for _ in range(15):
        drive.step()
    core.submit(request("long", prompt(60), max_tokens=2))
    before = {n: len(drive.told[key(n)].tokens) for n in (3, 4, 5)}
    waiting = core.load().waiting_tokens
    for _ in range(12):
        drive.step()
    assert all(len(drive.told[key(n)].tokens) >= before[n] + 3 for n in (3, 4, 5))
    assert core.load().waiting_tokens <= waiting - 3 * 4
    drive.run()
    assert len(drive.told[key("long")].tokens) == 2


def test_speculation_gives_up_its_blocks_before_anyone_is_preempted(make_core: MakeCore) -> None:
    """Two requests that fit exactly without room for drafts: both run to their ends beside each other."""
    core = make_core(speculation=7, block_tokens=4, kv_blocks=1 + 2 * 5)
    requests = [request(i, prompt(9, i), max_tokens=12) for i in range(2)]
    assert Drive(core).outputs(requests) == Drive(make_core()).outputs(requests)
    assert core.counters()["baton_preemptions_total"] == 0


def test_pages_of_a_cancelled_request_are_touched_no_more(make_core: MakeCore) -> None:
    """F30, A1: what is written into them after the cancel stays as it is, whatever the others do."""
    core = make_core(speculation=3, prefix_cache=False)
    drive = Drive(core)
    for n in (9, 10, 11):
        core.submit(request(n, prompt(n), max_tokens=20))
    for _ in range(4):
        drive.step()
    before = set(core.pools.blocks.free_ids()), set(core.pools.slots.free_ids())
    assert core.cancel(key(10))
    blocks, slots = set(core.pools.blocks.free_ids()) - before[0], set(core.pools.slots.free_ids()) - before[1]
    assert len(blocks) >= 4
    assert len(slots) == 5
    canary_blocks, canary_slots = core.pools.blocks.tensor[list(blocks)] + 1, core.pools.slots.tensor[list(slots)] + 1
    core.pools.blocks.tensor[list(blocks)], core.pools.slots.tensor[list(slots)] = canary_blocks, canary_slots
    for _ in range(5):
        drive.step()
    still = [page for page in blocks if page in core.pools.blocks.free_ids()]
    assert len(still) >= 2, "some went to the others, who grew"
    assert torch.equal(
        core.pools.blocks.tensor[list(blocks)][[page in still for page in blocks]], canary_blocks[[page in still for page in blocks]]
    )
    assert torch.equal(core.pools.slots.tensor[list(slots)], canary_slots)


def test_load_and_counters_tell_what_is_there(make_core: MakeCore) -> None:
    core = make_core(max_prefill_chunk=8, max_running=2, speculation=2)
    drive = Drive(core)
    for n in (17, 20, 30):
        core.submit(request(n, prompt(n), max_tokens=5))
    assert (core.load().waiting, core.load().waiting_tokens) == (3, 16 + 19 + 29)
    drive.step()
    load = core.load()
    assert (load.waiting, load.running, load.held_for_peers) == (1, 2, 0)
    assert load.waiting_tokens == 16 + 19 + 29 - 2 * 8
    drive.run()
    counters = core.counters()
    assert counters["baton_prompt_tokens_total"] == 16 + 19 + 29
    assert counters["baton_output_tokens_total"] == 15
    told = [ending for each in drive.told.values() for ending in each.endings if isinstance(ending, FinishedEvent)]
    assert sum(ending.proposed_drafts for ending in told) == counters["baton_proposed_drafts_total"]
    assert sum(ending.accepted_drafts for ending in told) == counters["baton_accepted_drafts_total"]
    assert all(ending.steps + ending.accepted_drafts == 5 for ending in told)


def test_a_first_chunk_is_announced_before_it_runs(make_core: MakeCore) -> None:
    core = make_core()
    core.submit(request("first", prompt(9), max_tokens=5))
    assert core.step() == [StartedEvent(key=key("first"))]
    assert core.counters()["baton_prompt_tokens_total"] == 0
    assert core.step() == []
    assert core.counters()["baton_prompt_tokens_total"] == 8
    assert not any(isinstance(event, StartedEvent) for event in core.step())


def test_nothing_to_do_is_no_work(make_core: MakeCore) -> None:
    core = make_core()
    assert not core.has_work()
    assert core.step() == []
    core.submit(request("a", prompt(3), max_tokens=1))
    assert core.has_work()
    Drive(core).run()
    assert not core.has_work()


def test_a_prompt_of_one_token_samples_at_once(make_core: MakeCore) -> None:
    """F16: no prior state, whatever the free pages hold; and max_tokens=1 asks for no draft."""
    core = make_core(speculation=3, tail_padding="always", prefix_cache=False)
    core.pools.slots.tensor.fill_(float("nan"))
    drive = Drive(core)
    core.submit(request("a", prompt(1), max_tokens=1))
    events = drive.step()
    assert [type(event).__name__ for event in events] == ["StartedEvent", "TokensEvent", "FinishedEvent"]
    assert core.counters()["baton_proposed_drafts_total"] == 0
    assert torch.isnan(core.pools.slots.tensor[2:]).all()
