"""top-k, top-p and min-p against definitions written as plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.filters import allowed_tokens, best

# Few distinct values, so that ties are everywhere.
SCORES = st.lists(st.sampled_from([-math.inf, -3.0, -1.0, -0.5, 0.0, 0.25, 2.0]), min_size=1, max_size=24).filter(
    lambda s: max(s) > -math.inf
)


def ranked(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def plain_definition(scores: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    kept = ranked(scores)[: top_k or len(scores)]
    if top_p < 1.0:
        weights = [math.exp(scores[i]) for i in kept]
        mass = np.cumsum(weights)
        kept = kept[: next(n for n in range(1, len(kept) + 1) if mass[n - 1] >= top_p * mass[-1])]
    if min_p > 0.0:
        kept = [i for i in kept if scores[i] >= scores[kept[0]] + math.log(min_p)]
    return sorted(kept)


@settings(max_examples=300, deadline=None)
@given(SCORES, st.integers(0, 30), st.sampled_from([1.0, 0.95, 0.6, 0.31, 1e-9]), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_allowed_tokens_match_the_plain_definition(scores: list[float], top_k: int, top_p: float, min_p: float) -> None:
    assert allowed_tokens(np.array(scores), top_k, top_p, min_p).tolist() == plain_definition(scores, top_k, top_p, min_p)


@settings(max_examples=200, deadline=None)
@given(SCORES, st.integers(1, 30))
def test_best_keeps_exactly_k_and_prefers_low_ids(scores: list[float], count: int) -> None:
    assert best(np.array(scores), count).tolist() == sorted(ranked(scores)[:count])


def test_neutral_settings_keep_everything() -> None:
    assert allowed_tokens(np.zeros(5), 0, 1.0, 0.0).tolist() == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    scores = np.log([0.5, 0.3, 0.2])
    assert allowed_tokens(scores, 0, 0.51, 0.0).tolist() == [0, 1]
    assert allowed_tokens(scores, 0, 0.49, 0.0).tolist() == [0]


def test_top_p_works_on_what_top_k_left() -> None:
    scores = np.log([0.4, 0.3, 0.2, 0.1])
    assert allowed_tokens(scores, 2, 0.57, 0.0).tolist() == [0]  # 0.4 / 0.7 > 0.57
    assert allowed_tokens(scores, 0, 0.57, 0.0).tolist() == [0, 1]


@pytest.mark.parametrize(("min_p", "kept"), [(1.0, [1]), (0.5, [1, 2]), (0.24, [0, 1, 2]), (0.01, [0, 1, 2, 3])])
def test_min_p_is_a_share_of_the_likeliest(min_p: float, kept: list[int]) -> None:
    scores = np.log([0.125, 0.5, 0.25, 0.05])
    assert allowed_tokens(scores, 0, 1.0, min_p).tolist() == kept
