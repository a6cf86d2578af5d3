"""What the router does about prefix caches: who holds what, what clients may say and are told, and flushing."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import Epoch
from protocol.messages import Admit, CacheFlushed, CacheUse, Cancel, FlushCache, Prefill
from router.placement import Place, place
from router.prefixes import PIECE_TOKENS, HeldPrefixes, chain_of
from tests.router.harness import FakeWorker, Harness, events, until
from tests.router.test_placement import decode, needs, prefill

LONG = 3 * PIECE_TOKENS


# ---- what a worker is likely to hold


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.integers(0, 8))
def test_what_is_held_is_one_beginning_of_what_was_noted_and_bounded(prompts: list[list[int]], limit: int) -> None:
    """Each number stands for a piece of tokens."""
    held = HeldPrefixes(limit * PIECE_TOKENS)
    for prompt in prompts:
        held.note(_chain(prompt))
        assert len(held) <= limit
        assert held.num_tokens(_chain(prompt)) == PIECE_TOKENS * min(len(prompt), limit), "the newest is held as far as it fits"
    for prompt in prompts:
        known = [length for length in range(len(prompt) + 1) if held.num_tokens(_chain(prompt[:length])) == length * PIECE_TOKENS]
        assert known == list(range(len(known))), "a longer beginning is never held without the shorter ones"
        assert held.num_tokens(_chain([9, *prompt])) == 0


def _chain(pieces: list[int]) -> tuple[int, ...]:
    return chain_of([piece for piece in pieces for _ in range(PIECE_TOKENS)], CacheUse())


def test_a_chain_depends_on_all_tokens_before_and_on_the_salt() -> None:
    tokens = list(range(2 * PIECE_TOKENS + 5))
    chain = chain_of(tokens, CacheUse())
    assert len(chain) == 2
    assert chain_of(tokens[:-5], CacheUse()) == chain
    assert chain_of([*tokens, 7], CacheUse()) == chain
    changed = chain_of([5, *tokens[1:]], CacheUse())
    assert changed[0] != chain[0]
    assert changed[1] != chain[1]
    assert set(chain_of(tokens, CacheUse(salt="a"))).isdisjoint(chain)
    assert chain_of(tokens, CacheUse(enabled=False)) == ()


# ---- placement


def test_the_one_that_holds_most_is_taken_among_equals() -> None:
    decodes = [decode("d0", "p0 p1"), decode("d1", "p0 p1", num_running=1)]
    prefills = [prefill("p0"), prefill("p1")]
    wanted = needs(num_prompt_tokens=100, held={Epoch("d1"): 64, Epoch("p1"): 64})
    assert place(prefills, decodes, wanted) == Place(Epoch("d1"), Epoch("p1"))


def test_a_hot_worker_is_not_overloaded_for_what_it_holds() -> None:
    wanted = needs(num_prompt_tokens=100, held={Epoch("d1"): 64, Epoch("p1"): 64})
    decodes = [decode("d0", "p0 p1", num_running=1), decode("d1", "p0 p1", num_running=3)]
    prefills = [prefill("p0", booked_tokens=10), prefill("p1", booked_tokens=75)]
    assert place(prefills, decodes, wanted) == Place(Epoch("d0"), Epoch("p0")), "waiting takes longer than computing"


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 100)), min_size=1, max_size=5))
def test_holding_moves_no_request_further_than_the_slack(workers: list[tuple[int, int]]) -> None:
    decodes = [decode(f"d{i}", num_running=running, max_running=8) for i, (running, _) in enumerate(workers)]
    chosen = place([], decodes, needs(held={Epoch(f"d{i}"): held for i, (_, held) in enumerate(workers)}))
    room = [running for running, _ in workers if running < 8]
    assert isinstance(chosen, Place) == bool(room)
    if isinstance(chosen, Place):
        assert workers[int(chosen.decode[1:])][0] <= min(room) + 2


async def test_a_conversation_stays_where_it_is_held(harness: Harness) -> None:
    """Even when others are just as idle and come first by name."""
    first, second, third = [await harness.decode(f"d{i}", capacity={"prefix_cache": True}) for i in range(3)]
    others = [asyncio.create_task(harness.complete([token] * PIECE_TOKENS, max_tokens=1)) for token in (8, 9)]
    admits = [await worker.expect(Admit) for worker in (first, second)]
    third.script = harness.says(" x")
    history = [7] * 2 * PIECE_TOKENS
    for turn in range(3):
        assert (await harness.complete([*history, *range(turn)])).status_code == 200
        for worker, admit in zip((first, second), admits if turn == 0 else (), strict=False):
            await worker.admit(admit)
            await worker.tokens(admit.key, 0, (5,))
            await worker.finish(admit.key, "length")
        await asyncio.gather(*others)
    assert [len(worker.got(Admit)) for worker in (first, second, third)] == [0, 0, 3]


async def test_nothing_is_remembered_of_one_that_has_no_cache_or_wants_none(harness: Harness) -> None:
    worker = await harness.decode(capacity={"prefix_cache": True})
    plain = await harness.decode()
    worker.script = plain.script = harness.says(" x")
    for _ in range(3):
        await harness.complete([7] * LONG, cache_prompt=False)
    assert [len(known.held) for known in harness.router.cluster.table] == [0, 0]
    for _ in range(3):
        await harness.complete([7] * LONG)
    assert [len(known.held) for known in harness.router.cluster.table] == [3, 0]


# ---- what the client says, and hears


async def test_salt_and_switch_reach_both_workers(harness: Harness) -> None:
    prefill_worker, decode_worker = await harness.pair()
    decode_worker.script = harness.says(" x")
    for fields, wanted in (
        ({}, CacheUse()),
        ({"cache_salt": None, "cache_prompt": None}, CacheUse()),
        ({"cache_salt": "tenant-7", "cache_prompt": True}, CacheUse(salt="tenant-7")),
        ({"cache_prompt": False}, CacheUse(enabled=False)),
    ):
        assert (await harness.complete([1, 2, 3], **fields)).status_code == 200
        assert (await decode_worker.expect(Admit)).cache == wanted
        assert (await prefill_worker.expect(Prefill)).cache == wanted


@pytest.mark.parametrize(
    "fields", [{"cache_salt": ""}, {"cache_salt": 5}, {"cache_salt": "x" * 257}, {"cache_salt": ["a"]}, {"cache_prompt": "no"}]
)
async def test_what_makes_no_sense_is_refused_by_its_name(harness: Harness, fields: dict[str, Any]) -> None:
    answer = await harness.complete([1, 2, 3], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))


async def test_a_prefill_worker_that_is_spared_hears_nothing(harness: Harness) -> None:
    prefill_worker, decode_worker = await harness.pair()
    texts = harness.says(" x", needs_prefill=False, cached_tokens=2)
    decode_worker.script = texts
    body = (await harness.complete([1, 2, 3])).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert prefill_worker.got(Prefill) == []
    assert all(not worker.requests for worker in harness.router.cluster.table)
    assert await harness.metric("baton_cached_tokens_total") == 2


async def test_losing_a_prefill_worker_that_is_spared_costs_nothing(harness: Harness) -> None:
    prefill_worker, decode_worker = await harness.pair()
    asked = asyncio.create_task(harness.complete([1, 2, 3], max_tokens=1))
    admit = await decode_worker.expect(Admit)
    await decode_worker.admit(admit, needs_prefill=False)
    await until(lambda: not any(worker.requests for worker in harness.router.cluster.table.prefills))
    await prefill_worker.leave()
    await until(lambda: not harness.router.cluster.table.prefills)
    await decode_worker.tokens(admit.key, 0, (5,))
    await decode_worker.finish(admit.key, "length")
    assert (await asked).status_code == 200


async def test_usage_tells_cached_tokens_in_every_shape(harness: Harness) -> None:
    decode_worker = await harness.decode()
    decode_worker.script = harness.says(" the cat sat", cached_tokens=2)
    whole = (await harness.complete([1, 2, 3])).json()["usage"]
    final = events(await harness.complete([1, 2, 3], stream=True, stream_options={"include_usage": True}))[-2]["usage"]
    assert whole["prompt_tokens_details"] == final["prompt_tokens_details"] == {"cached_tokens": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await harness.complete([1, 2, 3], stream=True, stream_options=options))[:-1]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {2}
    stopped = (await harness.complete([1, 2, 3], stop=[" cat"])).json()
    assert stopped["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}, "the router found the end"
    assert (await decode_worker.expect(Cancel)).keep
    chat = (await harness.chat()).json()
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_what_one_choice_computed_was_not_cached(harness: Harness) -> None:
    decode_worker = await harness.decode()
    hits = itertools.chain([0], itertools.repeat(2))
    decode_worker.script = lambda admit: harness.says(" x", cached_tokens=next(hits))(admit)
    usage = (await harness.complete([1, 2, 3], n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    again = (await harness.complete([1, 2, 3], n=3)).json()["usage"]
    assert again["prompt_tokens_details"] == {"cached_tokens": 2}


# ---- flushing


async def answer_flush(worker: FakeWorker, *, kept: int = 0) -> None:
    order = await worker.expect(FlushCache)
    await worker.send(
        CacheFlushed(epoch=worker.epoch, number=order.number, freed_blocks=10 - kept, freed_snapshots=3, kept_blocks=kept, kept_snapshots=0)
    )


async def test_flush_asks_every_worker_and_tells_what_came_free(harness: Harness) -> None:
    prefill_worker, decode_worker = await harness.pair()
    decode_worker.script = harness.says(" x")
    await harness.complete([7] * LONG)
    asked = asyncio.create_task(harness.client.post("/flush_cache"))
    await answer_flush(prefill_worker)
    await answer_flush(decode_worker, kept=4)
    body = (await asked).json()
    assert body["complete"] is False, "a request still uses some"
    told = {worker["worker_id"]: worker for worker in body["workers"]}
    assert told[decode_worker.worker_id] == {
        "worker_id": decode_worker.worker_id,
        "role": "decode",
        "freed_blocks": 6,
        "freed_snapshots": 3,
        "freed_bytes": 9 * 64,
        "kept_blocks": 4,
        "kept_snapshots": 0,
    }
    assert [len(worker.held) for worker in harness.router.cluster.table] == [0, 0]
    again = asyncio.create_task(harness.client.post("/flush_cache"))
    await asyncio.gather(answer_flush(prefill_worker), answer_flush(decode_worker))
    assert (await again).json()["complete"] is True


async def test_a_flush_of_nobody_is_complete(harness: Harness) -> None:
    assert (await harness.client.post("/flush_cache")).json() == {"complete": True, "workers": []}
    assert (await harness.client.get("/flush_cache")).status_code == 405


async def test_a_worker_that_leaves_meanwhile_is_named(harness: Harness) -> None:
    one, other = await harness.decode("one"), await harness.decode("other")
    asked = asyncio.create_task(harness.client.post("/flush_cache"))
    await answer_flush(one)
    await other.expect(FlushCache)
    await other.leave()
    answer = await asked
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "flush_incomplete"
    assert "other" in answer.json()["error"]["message"]
