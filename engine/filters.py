"""top-k, top-p and min-p: which tokens may be sampled. Ties are always decided for the lower token id."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def best(scores: Floats, count: int) -> Ids:
    """Indices of the ``count`` highest scores, ascending; among equal scores the lowest indices."""
    size = scores.shape[0]
    if count >= size:
        return np.arange(size)
    edge = np.partition(scores, size - count)[size - count]
    above = np.flatnonzero(scores > edge)
    tied = np.flatnonzero(scores == edge)[: count - above.shape[0]]
    return np.sort(np.concatenate((above, tied)))


def nucleus_size(scores: Floats, top_p: float) -> int:
    """Smallest n such that the n likeliest tokens of softmax(scores) hold at least ``top_p`` of its mass."""
    weights = np.exp(scores - scores.max())
    weights.sort()
    mass = np.cumsum(weights[::-1])
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def allowed_tokens(scores: Floats, top_k: int, top_p: float, min_p: float) -> Ids:
    """Token ids that pass top-k (0: off), then top-p over what is left, then min-p, ascending; at least one.

    ``scores`` [V] are logits divided by the temperature.
    """
    ids = best(scores, top_k or scores.shape[0])
    if top_p < 1.0:
        kept = scores[ids]
        ids = ids[best(kept, nucleus_size(kept, top_p))]
    if min_p > 0.0:
        kept = scores[ids]
        ids = ids[kept >= kept.max() + math.log(min_p)]
    return ids
