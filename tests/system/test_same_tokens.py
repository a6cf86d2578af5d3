"""The first promise: prefill and decode apart, speculation on, everything concurrent, and still the tokens of a plain process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.cluster_kit import Cluster, complete, complete_later
from tests.system.conftest import Alone

NEW_TOKENS = 12
LENGTHS = (*range(1, 71), 96, 127, 128, 129, 300, 513)


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 1024, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module", params=[3, 0, 1, 5], ids="K={}".format)
def split(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    cluster.use_speculation(request.param)
    return cluster


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], alone: Alone) -> list[list[int]]:
    return alone(prompts, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    """transformers, fp32. The checkpoint's time_step_min would floor dt in its prefill only, which no server does."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig.from_pretrained(model, time_step_min=1e-30, attn_implementation="eager")
    return NemotronHForCausalLM.from_pretrained(model, config=config, dtype=torch.float32).eval()


def test_one_process_equals_transformers(oracle: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Greedy, token for token: after each prompt with its own continuation, the next token is the likeliest one."""
    for prompt, tokens in zip(prompts, expected, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens, f"prompt of {len(prompt)}"


async def test_split_equals_one_process(split: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """All at once, arriving at different steps, long ones among short ones."""
    async with split.client() as client:
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(split.speculation or 0)).tolist()
        arrivals = [
            complete_later(0.01 * arrival, client, prompts[index], max_tokens=NEW_TOKENS, ignore_eos=True)
            for arrival, index in enumerate(order)
        ]
        answers = dict(zip(order, await asyncio.gather(*arrivals), strict=True))
    wrong = {len(prompts[i]): answers[i]["token_ids"] for i in range(len(prompts)) if answers[i]["token_ids"] != expected[i]}
    assert not wrong
    assert all(answer["finish_reason"] == "length" for answer in answers.values())
    split.until_whole()


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "seed": 3, "min_p": 0.05},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {"17": 3.0}},
]


@pytest.fixture(scope="module")
def sampled_prompts() -> list[list[int]]:
    return random_prompts((1, 2, 17, 33, 64), seed=1)


@pytest.fixture(scope="module")
def sampled(sampled_prompts: list[list[int]], alone: Alone) -> list[list[int]]:
    return [tokens for params in SAMPLINGS for tokens in alone(sampled_prompts, max_tokens=24, ignore_eos=True, **params)]


async def test_sampled_split_equals_one_process(split: Cluster, sampled_prompts: list[list[int]], sampled: list[list[int]]) -> None:
    async with split.client() as client:
        answers = await asyncio.gather(
            *(complete(client, prompt, max_tokens=24, ignore_eos=True, **params) for params in SAMPLINGS for prompt in sampled_prompts)
        )
    assert [answer["token_ids"] for answer in answers] == sampled
    split.until_whole()
