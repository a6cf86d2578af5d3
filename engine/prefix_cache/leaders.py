"""Whom to wait for. Pure functions: numbers in, numbers out.

Of requests with a common beginning that nobody has computed yet, one computes it and the others wait for it: all share one
token budget, so what they computed beside it would only keep both from going on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIN_GAIN = 32
"""Tokens. Neither a wait nor an extra stop of a chunk is worth less. See docs/prefix-cache.md for the figures."""

PIECE = 256
"""Tokens that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """A request that is computing its prefill."""

    arrival: int
    computed: int
    prefill_end: int
    shared: int
    """How many of its first tokens are also those of the one that might wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    leader: int
    """Its arrival."""
    position: int
    """The leader stops here and leaves its state."""


def fork(shared: int, block_tokens: int) -> int:
    """Where two requests part, for the purpose of a stop: the end of their last common block.

    Exactly equal tokens behind the true fork are chance, and would make a stop for every pair of requests.
    """
    return shared // block_tokens * block_tokens


def choose_wait(leaders: Iterable[Leader], *, cached: int, limit: int, block_tokens: int, waits: bool = False) -> Wait | None:
    """The leader that brings a request farthest, if waiting for it is shorter than computing; None: go on alone.

    ``cached``: where the request could start now; ``limit``: where its own prefill ends. Until the leader has come to the position,
    it computes ``position - computed`` tokens, where the request alone would compute ``position - cached``. A wait that spares
    the whole prefill costs no step, so it needs no least gain; neither does one that goes on (``waits``).
    """
    best: Wait | None = None
    for leader in leaders:
        position = min(leader.shared, limit, leader.prefill_end)
        if position < leader.prefill_end:
            position = fork(position, block_tokens)
        ahead = max(leader.computed, cached) < position and leader.computed >= cached
        worth = waits or position == limit or position - cached >= MIN_GAIN
        if ahead and worth and (best is None or position > best.position):
            best = Wait(leader=leader.arrival, position=position)
    return best


def longest_wait(tokens: int, max_chunk: int) -> int:
    """Steps that a request may wait for a leader to compute ``tokens``; then it goes on alone, whatever the leader does."""
    return 4 + 2 * -(-tokens // max_chunk)


def common_length(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same. Piece by piece: what parts early costs little, and what is equal is compared by the slice."""
    end = min(len(one), len(other))
    first = next((i for i in range(0, end, PIECE) if one[i : i + PIECE] != other[i : i + PIECE]), end)
    return next((i for i in range(first, end) if one[i] != other[i]), end)
