"""Invariant 18: tokens do not depend on the drafts, on the window's width, or on which door they came through."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import Sampler, greedy_tokens
from protocol.messages import TokenLogprob
from protocol.sampling import SamplingParams

VOCAB = 12
PROMPT = (1, 4, 4)
LENGTH = 14
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def model(history: Sequence[int]) -> Tensor:
    """A tiny language model: logits [V] from the last two tokens."""
    return TABLE[history[-1]] + 0.5 * TABLE[history[-2]].roll(1)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.5, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "seed": st.sampled_from([0, 1, 2**62]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 1.0, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
        "min_tokens": st.sampled_from([0, 3, 20]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)
Drafter = Callable[[list[int], int], list[int]]


def generate(params: SamplingParams, draft: Drafter) -> tuple[list[int], list[TokenLogprob]]:
    sampler = Sampler(params, PROMPT, (2,), VOCAB)
    output: list[int] = []
    logprobs: list[TokenLogprob] = []
    while len(output) < LENGTH:
        drafts = draft(output, len(PROMPT) + len(output))
        histories = [[*PROMPT, *output, *drafts[:j]] for j in range(len(drafts) + 1)]
        logits = torch.stack([model(history) for history in histories])
        result = sampler.accept_window(logits, drafts, len(PROMPT) + len(output), output)
        output.extend(result.tokens)
        logprobs.extend(result.logprobs or ())
    return output[:LENGTH], logprobs[:LENGTH]


@settings(max_examples=50, deadline=None)
@given(PARAMS, st.integers(1, 7), st.randoms(use_true_random=False))
def test_drafts_right_wrong_or_absent_give_the_same_tokens(values: dict[str, Any], width: int, random: Any) -> None:
    params = SamplingParams(max_tokens=50, **values)
    plain, plain_logprobs = generate(params, lambda output, position: [])
    answers = [*plain, *([0] * 8)]

    def right(output: list[int], position: int) -> list[int]:
        return answers[len(output) : len(output) + width]

    def mixed(output: list[int], position: int) -> list[int]:
        return [token if random.random() < 0.6 else random.randrange(VOCAB) for token in right(output, position)][
            : random.randint(0, width)
        ]

    def wrong(output: list[int], position: int) -> list[int]:
        return [(token + 1) % VOCAB for token in right(output, position)]

    for draft in (right, mixed, wrong):
        assert generate(params, draft) == (plain, plain_logprobs)


@settings(max_examples=40, deadline=None)
@given(PARAMS, st.integers(1, 7))
def test_a_drafter_that_knows_the_logits_is_always_right(values: dict[str, Any], width: int) -> None:
    """The drafter draws with the target's noise, filters and penalties: with equal logits it guesses every token."""
    params = SamplingParams(max_tokens=50, **values)
    sampler = Sampler(params, PROMPT, (2,), VOCAB)
    plain, _ = generate(params, lambda output, position: [])
    guessed: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        guessed.append(sampler.draft_token(model([*PROMPT, *guessed]), position, guessed))
    assert guessed == plain


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=7), st.integers(0, 2**32))
def test_the_batched_greedy_door_agrees_with_the_general_one(drafts: list[int], seed: int) -> None:
    logits = torch.randint(-3, 4, (len(drafts) + 1, VOCAB), generator=torch.Generator().manual_seed(seed)).float()
    sampler = Sampler(SamplingParams(), PROMPT, (2,), VOCAB)
    batched = greedy_tokens(logits).tolist()
    drafts = [token if i % 2 else batched[i] for i, token in enumerate(drafts)]
    assert sampler.accept_greedy(batched, drafts, 3) == sampler.accept_window(logits, drafts, 3, [])
