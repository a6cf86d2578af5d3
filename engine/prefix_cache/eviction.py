"""Which snapshot is given up first when slots are short: the one with the lowest score. Pure rules.

When blocks are short, age alone decides, because every block saves as many tokens; and KV without a snapshot behind it, which
saves no computation, goes before any; see ``kept.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.prefix_cache.nodes import Snapshot, Why

Score = Callable[[Snapshot], float]

CHANCE = {Why.GRID: 1.0, Why.PROMPT: 4.0, Why.LANDED: 4.0, Why.OUTPUT: 8.0, Why.BRANCH: 8.0}
"""How likely a snapshot is wanted, before anything was seen of it: in units of a grid snapshot's chance."""


def greedy_dual(snapshot: Snapshot) -> float:
    """Compute saved per byte, then age (GreedyDual-Size-Frequency: Cherkasova 1998).

    All slots have one size, so bytes drop out. ``clock`` rises with every eviction to the score of what went, so that
    what nobody wants any more goes in the end, however much it would save.
    """
    return snapshot.clock + snapshot.gain * (CHANCE[snapshot.why] + snapshot.hits)


def least_recently_used(snapshot: Snapshot) -> float:
    return float(snapshot.used_at)
