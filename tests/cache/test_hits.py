"""How long hits are, and that nobody's tokens change by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.request import ReadyEvent, SealedEvent, StartedEvent
from tests.cache.cache_kit import ROOMY, cached, expected, family, one_by_one
from tests.engine.engine_kit import KERNELS, Drive, MakeCore, assert_whole, key, poison, prompt, request

LENGTHS = (2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 50)


@pytest.mark.parametrize("speculation", [0, 3])
@pytest.mark.parametrize("mtp", [True, False])
def test_the_same_prompt_again_hits_all_but_its_last_token(make_core: MakeCore, speculation: int, mtp: bool) -> None:
    """F6, F35: N-1, whatever N is and whether MTP is on; a drafter's missing input came with the snapshot."""
    if speculation and not mtp:
        pytest.skip("drafts need MTP")
    drive = Drive(make_core(speculation=speculation, mtp=mtp, **ROOMY))
    for length in LENGTHS:
        first, second = (request(f"{length}.{i}", prompt(length), max_tokens=6) for i in range(2))
        poison(drive.core)
        outputs = one_by_one(drive, [first, second])
        assert outputs[0] == outputs[1]
        assert cached(drive, f"{length}.1") == length - 1


def test_a_hit_drafts_as_well_as_a_whole_prefill(make_core: MakeCore) -> None:
    """C11: the hidden tail and MTP's KV are those of a cold run, so are the drafts, and so the steps."""
    drive = Drive(make_core(speculation=3, **ROOMY))
    one_by_one(drive, [request(i, prompt(37), max_tokens=30) for i in range(2)])
    cold, warm = drive.told[key(0)].endings[0], drive.told[key(1)].endings[0]
    told = ("steps", "proposed_drafts", "accepted_drafts")
    assert [getattr(cold, name) for name in told] == [getattr(warm, name) for name in told]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("speculation", [0, 4])
def test_families_get_the_tokens_of_a_run_without_a_cache(make_core: MakeCore, kernels: Any, speculation: int) -> None:
    """F2: cold and warm, greedy and sampled."""
    prompts = [*family(21, (1, 9, 30)), *family(40, (3, 18), seed=9), prompt(3), prompt(1)]
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 3, "top_p": 0.95}
    requests = [request(i, each, max_tokens=7, **(sampled if i % 2 else {})) for i, each in enumerate(prompts * 2)]
    drive = Drive(make_core(kernels=kernels, speculation=speculation, **ROOMY))
    poison(drive.core)
    assert one_by_one(drive, requests) == expected(make_core, requests)
    assert [cached(drive, i) for i in range(len(prompts), 2 * len(prompts))] == [len(each) - 1 for each in prompts]


def test_a_fork_is_hit_exactly_from_the_third_request_on(make_core: MakeCore) -> None:
    """The first leaves the grid, the second sees where they part and stops there, the third goes on from there."""
    prompts = family(44, (30, 30, 30, 30))
    drive = Drive(make_core(**ROOMY))
    one_by_one(drive, [request(i, each, max_tokens=2) for i, each in enumerate(prompts)])
    assert [cached(drive, i) for i in range(4)] == [0, 32, 32, 32], "12 tokens more aren't worth a stop"
    drive = Drive(make_core(**ROOMY | {"snapshot_tokens": 64, "max_prefill_chunk": 64}))
    one_by_one(drive, [request(i, each, max_tokens=2) for i, each in enumerate(prompts)])
    assert [cached(drive, i) for i in range(4)] == [0, 0, 44, 44]
    assert drive.core.cache_stats().replay_tokens == 44, "the second one's KV was there"


def test_a_fork_right_before_the_prompts_ends_is_hit_as_well(make_core: MakeCore) -> None:
    """Short questions behind long examples: less than a block of their own, and all of the rest in common."""
    drive = Drive(make_core(**ROOMY | {"snapshot_tokens": 64, "max_prefill_chunk": 64}))
    one_by_one(drive, [request(i, each, max_tokens=2) for i, each in enumerate(family(50, (1, 1, 1, 1)))])
    assert [cached(drive, i) for i in range(4)] == [0, 0, 48, 48]


def test_the_next_turn_finds_prompt_and_answer(make_core: MakeCore) -> None:
    """F6's open half: what D computed itself is kept: all but the last token that it sampled."""
    drive = Drive(make_core(speculation=3, **ROOMY))
    history, hits = prompt(19), []
    for turn in range(4):
        each = request(turn, history, max_tokens=11)
        (answer,) = drive.outputs([each])
        assert [answer] == expected(make_core, [each])
        hits.append((cached(drive, turn), len(history)))
        history = (*history, *answer, *prompt(5, turn))
    assert hits == [(0, 19), (19 + 10, 35), (35 + 10, 51), (51 + 10, 67)]


def test_an_answer_that_was_cut_is_kept_when_asked_for(make_core: MakeCore) -> None:
    """The router stops at a stop string; the client's next turn has what came before it."""
    drive = Drive(make_core(speculation=3, **ROOMY))
    drive.core.submit(request("cut", prompt(19), max_tokens=40))
    while key("cut") not in drive.told or len(drive.told[key("cut")].tokens) < 9:
        drive.step()
    tokens = drive.told[key("cut")].tokens
    assert drive.core.cancel(key("cut"), keep=True)
    drive.outputs([request("next", (*prompt(19), *tokens, 3, 4), max_tokens=2)])
    assert cached(drive, "next") == 19 + len(tokens) - 1


def test_two_prompts_that_share_10_k_tokens(make_core: MakeCore) -> None:
    """C15, with the settings of a worker. The second hits the last grid line before the fork, the third the fork itself."""
    beginning = prompt(10_000, 5)
    prompts = [(*beginning, 2 + number, *prompt(40, number)) for number in range(3)]
    config: dict[str, Any] = {"kernels": KERNELS[-1], "speculation": 3, "block_tokens": 16, "kv_blocks": 700, "max_model_len": 12_000}
    drive = Drive(make_core(**config))
    one_by_one(drive, [request(i, each, max_tokens=3) for i, each in enumerate(prompts)])
    assert [cached(drive, i) for i in range(3)] == [0, 9_984, 9_984]
    again = [request("again", prompts[0], max_tokens=3)]
    assert one_by_one(drive, again) == [drive.told[key(0)].tokens]
    assert cached(drive, "again") == 10_040


# --- without a state, without sharing, without a cache


@pytest.mark.parametrize("kernels", KERNELS)
def test_kv_without_a_state_is_read_and_the_state_computed_again(make_core: MakeCore, kernels: Any) -> None:
    """F5, C16: no snapshot is kept, so every request begins at 0; but KV is shared, and written once."""
    prompts = [*family(40, (9, 30)), prompt(40)]
    requests = [request(i, each, max_tokens=5) for i, each in enumerate(prompts * 2)]
    drive = Drive(make_core(kernels=kernels, speculation=3, **ROOMY | {"snapshot_slots": 0}))
    assert one_by_one(drive, requests) == expected(make_core, requests)
    assert all(cached(drive, i) == 0 for i in range(len(requests)))
    stats = drive.core.cache_stats()
    assert (stats.hits, stats.snapshots) == (0, 0)
    assert stats.replay_tokens == 40 + 36 + 48 + 68 + 36, "full blocks of what had been there"


def test_a_hand_off_replays_nothing(make_core: MakeCore) -> None:
    """Its state comes from a peer, so the KV that is here already isn't there for a replay."""
    drive = Drive(make_core(**ROOMY))
    first = request("first", prompt(40), max_tokens=2)
    drive.outputs([first])
    landing = drive.core.reserve(request("lands", (*first.token_ids[:30], *prompt(5, 2)), origin="remote"))
    assert landing is not None
    assert landing.have_blocks > 0
    assert drive.core.cache_stats().replay_tokens == 0


def test_the_time_saved_never_shrinks(make_core: MakeCore) -> None:
    """Hits are counted at what a token took until then; what tokens take later changes nothing of it."""
    drive, told = Drive(make_core(**ROOMY | {"max_prefill_chunk": 64})), [0.0]
    for length in (60, 60, 100, 1, 100, 17, 60):
        drive.outputs([request(len(told), prompt(length), max_tokens=1)])
        told.append(drive.core.counters()["baton_cache_saved_seconds_total"])
    assert told == sorted(told)
    assert told[-1] > 0


def test_a_few_tokens_say_nothing_of_the_time_that_many_take(make_core: MakeCore) -> None:
    """On a decode worker a step of a few prompt tokens takes what a step takes: its hits would seem to save minutes."""
    drive = Drive(make_core(**ROOMY))
    one_by_one(drive, [request(i, prompt(60), max_tokens=1) for i in range(2)])
    assert cached(drive, 1) == 59
    assert drive.core.counters()["baton_cache_saved_seconds_total"] == 0


def test_salts_and_requests_that_want_no_cache_share_nothing(make_core: MakeCore) -> None:
    drive, tokens = Drive(make_core(**ROOMY)), prompt(30)
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"use_cache": False}]
    for number in range(2):
        for index, kind in enumerate(kinds):
            drive.outputs([replace(request(f"{index}.{number}", tokens, max_tokens=2), **kind)])
    assert [cached(drive, f"{index}.0") for index in range(4)] == [0, 0, 0, 0]
    assert [cached(drive, f"{index}.1") for index in range(4)] == [29, 29, 29, 0]


def test_a_cache_that_is_off_does_nothing(make_core: MakeCore) -> None:
    drive = Drive(make_core(**ROOMY, prefix_cache=False))
    one_by_one(drive, [request(i, prompt(30), max_tokens=2) for i in range(2)])
    assert cached(drive, 1) == 0
    assert drive.core.flush_cache() == 0
    assert not any(value for name, value in drive.core.counters().items() if name.startswith("baton_cache"))


def test_looking_changes_nothing(make_core: MakeCore) -> None:
    drive = Drive(make_core(**ROOMY))
    drive.outputs([request("a", prompt(30), max_tokens=2)])
    before = drive.core.counters()
    found = drive.core.cached((*prompt(30), 5, 6))
    assert (found.state_tokens, found.kv_tokens) == (29, 28)
    assert drive.core.cached(prompt(30), "salt").state_tokens == 0
    assert drive.core.cached(()).kv_tokens == 0
    assert drive.core.counters() == before


# --- prefills for peers


def test_a_prefill_that_is_found_whole_computes_nothing(make_core: MakeCore) -> None:
    """F27: N = m*B + 1 included. Started, ready and sealed are told at once; the pages are as final as ever."""
    drive = Drive(make_core(**ROOMY))
    for length in (1, 4, 16, 19, 40):
        for number in range(2):
            name = f"{length}.{number}"
            drive.core.submit(request(name, prompt(length), origin="seal"))
            steps = drive.core.counters()["baton_steps_total"]
            drive.run()
            (sealed,) = drive.told[key(name)].endings
            assert isinstance(sealed, SealedEvent)
            assert drive.core.pools.slots.tags[sealed.slot] == length
            assert (drive.core.counters()["baton_steps_total"] == steps) == (number == 1)
            assert cached(drive, name) == number * length
            own = [event for event in drive.events if event.key == key(name)]
            ready = [event.blocks for event in own if isinstance(event, ReadyEvent)]
            assert isinstance(own[0], StartedEvent)
            assert sum(ready, ()) == sealed.blocks[: length // 4]
        drive.core.release(key(f"{length}.0"))
        drive.core.release(key(f"{length}.1"))
    assert_whole(drive.core)
