"""Who holds the prompt already: D, P, both or nobody. The tokens are the same, and no byte too many travels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.messages import CacheUse, Finished, PrefillDone, Role
from tests.engine.engine_kit import Drive, prompt, request
from tests.workers.together import SHARED, Story, Together, make_core, together

NEW_TOKENS = 9
BLOCK = 4
GRID = 8


def alone(path: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """One engine, no speculation, no cache."""
    return Drive(make_core(path, prefix_cache=False)).outputs(
        request(number, tokens, max_tokens=NEW_TOKENS) for number, tokens in enumerate(prompts)
    )


class Asker:
    """Asks one thing after the other, with names of its own, and waits for each to end."""

    def __init__(self, cluster: Together) -> None:
        self.cluster = cluster
        self._number = 0

    async def __call__(self, tokens: Sequence[int], *, cache: CacheUse = SHARED, local_tokens: int = 0) -> Story:
        self._number += 1
        story = await self.cluster.router.ask(f"r{self._number}", tokens, cache=cache, local_tokens=local_tokens, max_tokens=NEW_TOKENS)
        ending = await story.end()
        assert isinstance(ending, Finished), ending
        await self.cluster.whole()
        return story

    async def computed_by_p(self) -> float:
        counters = await self.cluster.prefill.bridge.call(lambda core: core.counters())
        return counters["baton_prompt_tokens_total"]

    def size(self, num_blocks: int) -> int:
        """Bytes of a hand-off with so many blocks."""
        blocks, slots = self.cluster.decode.core.regions
        return num_blocks * blocks.page_bytes + slots.page_bytes


@pytest.mark.parametrize(("length", "speculation"), [(2, 3), (5, 3), (6, 3), (9, 3), (25, 3), (42, 3), (24, 0)])
async def test_nobody_both_p_and_d(checkpoint: Path, length: int, speculation: int) -> None:
    tokens = prompt(length)
    position, num_blocks = length - 1, -(-(length - 1) // BLOCK)
    (expected,) = alone(checkpoint, [tokens])
    async with together(checkpoint, speculation=speculation, snapshot_tokens=GRID) as cluster:
        ask = Asker(cluster)

        cold = await ask(tokens)
        assert (cold.tokens, cold.cached_tokens, cold.transfer_bytes) == (expected, 0, ask.size(num_blocks))
        assert await ask.computed_by_p() == position

        both = await ask(tokens)
        assert (both.tokens, both.cached_tokens, both.transfer_bytes) == (expected, position, 0)
        assert both.prefill_ending is None, "P isn't used"

        await cluster.router.flush("decode")
        only_p = await ask(tokens)
        assert (only_p.tokens, only_p.cached_tokens, only_p.transfer_bytes) == (expected, position, ask.size(num_blocks))
        assert isinstance(only_p.prefill_ending, PrefillDone)
        assert await ask.computed_by_p() == position, "nothing is computed twice"

        await cluster.router.flush("prefill")
        only_d = await ask(tokens)
        assert (only_d.tokens, only_d.cached_tokens, only_d.transfer_bytes) == (expected, position, 0)
        assert only_d.prefill_ending is None

        await cluster.router.flush("decode")
        again = await ask(tokens)
        assert (again.tokens, again.cached_tokens, again.transfer_bytes) == (expected, 0, ask.size(num_blocks))


@pytest.mark.parametrize("speculation", [0, 3])
async def test_only_what_d_lacks_travels(checkpoint: Path, speculation: int) -> None:
    """The second prompt begins like the first; D lacks what comes after, and h(N-1)."""
    first = prompt(41)
    second = (*first[:26], *prompt(15, seed=1))
    third = (*first[:32], *prompt(2, seed=2))
    expected = alone(checkpoint, [first, second, third])
    async with together(checkpoint, speculation=speculation, snapshot_tokens=GRID) as cluster:
        ask = Asker(cluster)
        told = [await ask(tokens) for tokens in (first, second, third)]
        assert [story.tokens for story in told] == expected
        assert told[1].transfer_bytes == ask.size(10 - 26 // BLOCK)
        assert told[2].transfer_bytes == ask.size(9 - 32 // BLOCK)
        assert [story.cached_tokens for story in told] == [0, 24, 32], "what P had to compute counts, whatever D held"


async def test_a_block_that_ends_with_the_prompt_leaves_only_the_state_to_travel(checkpoint: Path) -> None:
    """D has the KV of [0, N-1) of a longer prompt, but no state there."""
    longer = prompt(40)
    tokens = longer[:21]
    (expected,) = alone(checkpoint, [tokens])
    async with together(checkpoint, speculation=3, snapshot_tokens=16) as cluster:
        ask = Asker(cluster)
        await ask(longer)
        story = await ask(tokens)
        assert (story.tokens, story.transfer_bytes) == (expected, ask.size(0))
        assert story.cached_tokens == 16


@pytest.mark.parametrize("speculation", [0, 3])
async def test_the_next_turn_of_a_conversation(checkpoint: Path, speculation: int) -> None:
    """D has prompt and answer, P only the prompt. A short rest D computes by itself."""
    opening = prompt(30)
    (answer,) = alone(checkpoint, [opening])
    follow_up = (*opening, *answer, *prompt(5, seed=3))
    third = (*follow_up, 7, 8)
    expected = alone(checkpoint, [follow_up, third])
    held = 30 + NEW_TOKENS - 1  # the newest token is known and not computed
    async with together(checkpoint, speculation=speculation, snapshot_tokens=GRID) as cluster:
        ask = Asker(cluster)
        await ask(opening)
        fetched = await ask(follow_up)
        assert (fetched.tokens, fetched.needs_prefill) == (expected[0], True)
        assert fetched.cached_tokens == 29, "P knows the prompt, not the answer"
        assert fetched.transfer_bytes == ask.size(11 - held // BLOCK)

    async with together(checkpoint, speculation=speculation, snapshot_tokens=GRID) as cluster:
        ask = Asker(cluster)
        await ask(opening)
        local = await ask(follow_up, local_tokens=len(follow_up) - 1 - held)
        assert (local.tokens, local.needs_prefill, local.transfer_bytes) == (expected[0], False, 0)
        assert local.cached_tokens == held
        assert local.prefill_ending is None
        longer = await ask(third, local_tokens=1)
        assert (longer.tokens, longer.needs_prefill) == (expected[1], True), "the rest is longer than that"


async def test_salts_separate_and_a_request_may_stay_out(checkpoint: Path) -> None:
    tokens = prompt(25)
    (expected,) = alone(checkpoint, [tokens])
    out, a, b = CacheUse(enabled=False), CacheUse(salt="a"), CacheUse(salt="b")
    async with together(checkpoint, speculation=3, snapshot_tokens=GRID) as cluster:
        ask = Asker(cluster)
        told = [await ask(tokens, cache=cache) for cache in (out, out, a, b, SHARED, a, b, out)]
    assert [story.cached_tokens for story in told] == [0, 0, 0, 0, 0, 24, 24, 0]
    assert [story.needs_prefill for story in told] == [True, True, True, True, True, False, False, True]
    assert all(story.tokens == expected for story in told)


@pytest.mark.parametrize("off", ["prefill", "decode"])
async def test_a_cache_may_be_off_on_one_side(checkpoint: Path, off: Role) -> None:
    tokens = prompt(25)
    (expected,) = alone(checkpoint, [tokens])
    async with together(checkpoint, speculation=3, snapshot_tokens=GRID, without_cache=off) as cluster:
        ask = Asker(cluster)
        told = [await ask(tokens) for _ in range(3)]
        assert [story.tokens for story in told] == [expected] * 3
        assert [story.cached_tokens for story in told] == [0, 24, 24]
        assert [story.needs_prefill for story in told] == [True, off == "decode", off == "decode"]
        assert cluster.router.hellos[cluster.prefill.epoch].capacity.prefix_cache == (off != "prefill")
        assert cluster.router.hellos[cluster.decode.epoch].info["prefix_cache"].startswith("off" if off == "decode" else "on")
