"""Sampled tokens have the distribution that the parameters ask for: chi-square over many seeds and positions, fixed, so deterministic."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.sampling import Sampler
from protocol.sampling import SamplingParams

LOGITS = torch.tensor([1.0, 0.2, -0.5, 1.7, 0.0, -2.0, 0.9, 0.9])
PROMPT, OUTPUT = (0, 3), (6, 6, 1)
DRAWS = 2500
# 99.9% quantiles of chi-square for 1..7 degrees of freedom
QUANTILE = (10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)


def expected_probabilities(params: SamplingParams) -> NDArray[np.float64]:
    """The definition, without noise, ties or speed in mind."""
    z = LOGITS.double().numpy().copy()
    for token in {*PROMPT, *OUTPUT}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(OUTPUT):
        z[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    for token, bias in params.logit_bias.items():
        z[token] += bias
    p = np.exp(z / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    p[order[params.top_k or len(p) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.2, "temperature": 1.5},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {5: 3.0, 3: -1.0}, "top_p": 0.95},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_definition(case: dict[str, Any], over: str) -> None:
    params = SamplingParams(**{"temperature": 1.0, **case})
    expected = expected_probabilities(params)
    counts = np.zeros(len(expected))
    one_seed = Sampler(params, PROMPT, (), len(expected))
    for i in range(DRAWS):
        sampler = one_seed if over == "positions" else Sampler(params.model_copy(update={"seed": i}), PROMPT, (), len(expected))
        counts[sampler.draft_token(LOGITS, i if over == "positions" else 5, OUTPUT)] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible])).sum()
    assert chi_square < QUANTILE[possible.sum() - 2]


def test_neighbouring_positions_are_independent() -> None:
    """Noise streams that overlapped would show here: pairs of tokens at (p, p+1) on a flat distribution of 8."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=9), (), (), 8)
    tokens = [sampler.draft_token(torch.zeros(8), position, []) for position in range(6401)]
    counts = np.zeros((8, 8))
    for pair in pairwise(tokens):
        counts[pair] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 103.4  # 99.9% at 63 degrees
