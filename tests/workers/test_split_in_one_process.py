"""Both workers together over the loopback transport: the split answers like a single process, and everything comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Finished, PrefillDone
from tests.engine.engine_kit import Drive, prompt, request
from tests.workers.together import make_core, together

NEW_TOKENS = 9


def alone(path: Path, prompts: dict[str, tuple[int, ...]], **params: Any) -> dict[str, list[int]]:
    """The same requests in one engine without speculation."""
    drive = Drive(make_core(path))
    for name, tokens in prompts.items():
        drive.core.submit(request(name, tokens, **({"max_tokens": NEW_TOKENS} | params)))
    drive.run()
    return {key.request_id: told.tokens for key, told in drive.told.items()}


@pytest.mark.parametrize("speculation", [0, 3])
async def test_split_equals_one_process(checkpoint: Path, speculation: int) -> None:
    prompts = {str(length): prompt(length) for length in (*range(1, 14), 31, 48)}
    expected = alone(checkpoint, prompts)
    async with together(checkpoint, speculation=speculation) as cluster:
        stories = {}
        for name, tokens in prompts.items():
            story = await cluster.router.ask(name, tokens, max_tokens=NEW_TOKENS)
            while not story.admitted.is_set():  # busy: once more when somebody has left
                await asyncio.sleep(0.02)
                story = await cluster.router.ask(name, tokens, max_tokens=NEW_TOKENS)
            stories[name] = story
        for name, story in stories.items():
            ending = await story.end()
            assert isinstance(ending, Finished), ending
            assert story.tokens == expected[name], f"prompt of {name}"
            if len(prompts[name]) > 1:
                assert isinstance(await cluster.router.prefill_end(story), PrefillDone)
            assert story.first is not None
            assert story.first.timing is not None
            assert (story.first.timing.transfer_bytes > 0) == (len(prompts[name]) > 1)
        await cluster.whole()


async def test_sampled_split_equals_one_process(checkpoint: Path) -> None:
    prompts = {"a": prompt(10), "b": prompt(17)}
    expected = alone(checkpoint, prompts, temperature=1.0, seed=5, top_p=0.9)
    async with together(checkpoint, speculation=2) as cluster:
        for name, tokens in prompts.items():
            story = await cluster.router.ask(name, tokens, max_tokens=NEW_TOKENS, temperature=1.0, seed=5, top_p=0.9)
            await story.end()
            assert story.tokens == expected[name]


async def test_local_prefill_answers_the_same(checkpoint: Path) -> None:
    expected = alone(checkpoint, {"a": prompt(10)})
    async with together(checkpoint) as cluster:
        story = await cluster.router.admit("a", prompt(10), remote=False, max_tokens=NEW_TOKENS)
        assert isinstance(await story.end(), Finished)
        assert story.tokens == expected["a"]
        assert story.prefill_ending is None
        await cluster.whole()
