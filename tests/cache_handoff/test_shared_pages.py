"""Pages that the cache shares, when something goes wrong: nobody writes them, nobody keeps them, and what is told afterwards is true."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.core import EngineCore
from protocol.ids import RequestId, RequestKey
from protocol.messages import Cancelled, Failed, Finished, PrefillDone
from tests.cache_handoff.test_four_combinations import NEW_TOKENS, alone
from tests.engine.engine_kit import prompt
from tests.workers.together import Story, Together, together
from transfer.loopback import Faults

GRID = 8
LONG = prompt(42)


async def ended(cluster: Together, name: str, tokens: tuple[int, ...]) -> Story:
    story = await cluster.router.ask(name, tokens, max_tokens=NEW_TOKENS)
    assert isinstance(await story.end(), Finished), story.decode_ending
    return story


def cached_pages(core: EngineCore) -> dict[int, bytes]:
    """What is in D's blocks that are nobody's but the cache's. On the engine's thread, with no request there."""
    free = set(core.pools.blocks.free_ids())
    memory, size = core.regions[0].memory, core.regions[0].page_bytes
    return {page: bytes(memory[page * size : (page + 1) * size]) for page in range(1, core.regions[0].num_pages) if page not in free}


@pytest.mark.parametrize("faults", [Faults(corrupt=1.0), Faults(truncate=1.0), Faults(fail_send=1.0), Faults(die_after=0)])
async def test_a_hand_off_that_fails_leaves_shared_pages_as_they_were(checkpoint: Path, faults: Faults) -> None:
    """D computes the beginning by itself; the hand-off of a longer prompt goes wrong over it."""
    beginning = LONG[:25]
    (expected,) = alone(checkpoint, [beginning])
    async with together(checkpoint, faults=faults, speculation=3, lease_s=0.5, snapshot_tokens=GRID) as cluster:
        cluster.may_fail = faults.die_after is not None
        own = await cluster.router.admit("own", beginning, remote=False, max_tokens=NEW_TOKENS)
        assert isinstance(await own.end(), Finished)
        await cluster.decode.bridge.call(lambda core: core.check_integrity())
        before = await cluster.decode.bridge.call(cached_pages)
        assert len(before) >= 25 // 4
        story = await cluster.router.ask("r", LONG, max_tokens=NEW_TOKENS)
        assert isinstance(await story.end(), Failed)
        if not cluster.may_fail:
            await cluster.whole()
        assert await cluster.decode.bridge.call(cached_pages) == before, "nothing is written, nothing published, nothing lost"
        again = await cluster.router.admit("again", beginning, remote=False, max_tokens=NEW_TOKENS)
        assert isinstance(await again.end(), Finished)
        assert (own.tokens, again.tokens, again.cached_tokens) == (expected, expected, 24)


async def test_what_d_holds_needs_no_living_prefill_worker(checkpoint: Path) -> None:
    (expected,) = alone(checkpoint, [LONG])
    async with together(checkpoint, speculation=3, snapshot_tokens=GRID) as cluster:
        first = await ended(cluster, "first", LONG)
        await cluster.whole()
        place = cluster.router.place(cluster.prefill.epoch)
        cluster.p_transport.die()
        cluster.p_task.cancel()
        await cluster.router.until(lambda: not cluster.router.paired[cluster.decode.epoch].ok)
        assert place.epoch == cluster.router.paired[cluster.decode.epoch].peer
        story = await cluster.router.admit("alone", LONG, remote=False, max_tokens=NEW_TOKENS)
        assert isinstance(await story.end(), Finished)
        assert (first.tokens, story.tokens, story.cached_tokens, story.transfer_bytes) == (expected, expected, 41, 0)
        cluster.may_fail = True


async def test_a_lease_over_shared_pages_ends_and_costs_the_cache_nothing(checkpoint: Path) -> None:
    """P seals out of its cache for a decode worker that never comes."""
    (expected,) = alone(checkpoint, [LONG])
    async with together(checkpoint, lease_s=0.3, snapshot_tokens=GRID) as cluster:
        router = cluster.router
        await ended(cluster, "first", LONG)
        await router.flush("decode")
        held = await cluster.prefill.bridge.call(cached_pages)
        for number in range(3):
            key = RequestKey(RequestId(f"nobody{number}"), 0)
            router.stories[key] = Story(key)
            await router.prefill(router.stories[key], LONG)
        await router.until(lambda: all(story.prefill_ending for story in router.stories.values()))
        await cluster.whole()
        assert await cluster.prefill.bridge.call(cached_pages) == held
        story = await ended(cluster, "last", LONG)
        assert (story.tokens, story.cached_tokens) == (expected, 41)


async def test_a_flush_under_way_hurts_nobody(checkpoint: Path) -> None:
    (expected,) = alone(checkpoint, [LONG])
    async with together(checkpoint, faults=Faults(delay_s=0.005), speculation=3, snapshot_tokens=GRID) as cluster:
        await ended(cluster, "first", LONG)
        stories = []
        for number in range(4):
            stories.append(await cluster.router.ask(f"r{number}", LONG, max_tokens=NEW_TOKENS))
            await asyncio.gather(cluster.router.flush("decode"), cluster.router.flush("prefill"))
        for story in stories:
            assert isinstance(await story.end(), Finished), story.decode_ending
            assert story.tokens == expected
        await cluster.whole()
        for role in ("decode", "prefill"):
            flushed = await cluster.router.flush(role)
            assert (flushed.kept_blocks, flushed.kept_snapshots) == (0, 0)


async def test_cancels_at_random_stages_leave_the_pools_whole_and_the_cache_true(checkpoint: Path) -> None:
    draw = random.Random(5)
    prompts = [(*LONG[: draw.randrange(2, 40)], *prompt(draw.randrange(1, 12), seed=seed)) for seed in range(12)]
    expected = alone(checkpoint, prompts)
    async with together(checkpoint, faults=Faults(delay_s=0.005), speculation=2, snapshot_tokens=GRID, kv_blocks=80) as cluster:

        async def one(number: int) -> None:
            await asyncio.sleep(draw.random() * 0.4)
            which = draw.randrange(len(prompts))
            story = await cluster.router.ask(f"r{number}", prompts[which], max_tokens=NEW_TOKENS, local_tokens=draw.choice((0, 8)))
            if draw.random() < 0.6:
                await asyncio.sleep(draw.random() ** 2 * 0.2)
                await cluster.router.cancel(story)
            ending = await story.end()
            if isinstance(ending, Finished):
                assert story.tokens == expected[which]
            else:
                assert not isinstance(ending, Failed) or ending.message == "the request was cancelled", ending

        await asyncio.gather(*(one(number) for number in range(60)))
        await cluster.whole()
        for which, tokens in enumerate(prompts):
            story = await ended(cluster, f"afterwards{which}", tokens)
            assert story.tokens == expected[which]
        await cluster.whole()


async def test_a_decode_worker_that_dies_takes_nothing_along(checkpoint: Path) -> None:
    """P's pages are shared by its cache and by two hand-offs when D dies."""
    async with together(checkpoint, faults=Faults(delay_s=0.05), snapshot_tokens=GRID) as cluster:
        router = cluster.router
        await ended(cluster, "first", LONG)
        await router.flush("decode")
        held = await cluster.prefill.bridge.call(cached_pages)
        stories = [await router.ask(f"r{number}", LONG, max_tokens=NEW_TOKENS) for number in range(2)]
        await router.until(lambda: all(isinstance(story.prefill_ending, PrefillDone) for story in stories))
        cluster.d_transport.die()
        for _ in range(500):
            if not cluster.prefill.requests.num_open:
                break
            await asyncio.sleep(0.01)
        assert cluster.prefill.requests.num_open == 0
        load = await cluster.prefill.bridge.call(lambda core: core.load())
        assert (load.running, load.held_for_peers) == (0, 0)
        await cluster.prefill.bridge.call(lambda core: core.check_integrity())
        assert await cluster.prefill.bridge.call(cached_pages) == held
        assert not any(isinstance(story.decode_ending, Cancelled) for story in stories)
