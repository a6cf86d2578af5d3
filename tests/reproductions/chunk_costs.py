"""What keeping chunk ends on the grid costs: forward steps, and states that could be kept, against the rule with the hole.

85 configurations: grid x prompt length x the share of a step's 8192 tokens that the prompt gets. A share is at least one grid
step: with less, no rule that wants the grid can promise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.config import ChunkPolicy
from engine.planner import ChunkRule, plan_chunk
from tests.reproductions.column_server import old_split

STEP_TOKENS = 8192
GRIDS = (560, 1072, 1600, 2048)
LENGTHS = (2002, 3920, 8192, 16_000, 32_000)
DIVISORS = (1, 2, 3, 4, 8)

Rule = Callable[[int], int]
"""Computed tokens -> tokens of the next chunk."""


@dataclass(frozen=True, slots=True)
class Configuration:
    grid: int
    length: int
    share: int

    def ours(self, policy: ChunkPolicy, backoff_tokens: int) -> Rule:
        rule = ChunkRule(policy=policy, grid=self.grid, max_chunk=STEP_TOKENS, backoff_tokens=backoff_tokens)
        return lambda start: plan_chunk(rule, start=start, target=self.length, budget=self.share)

    def old(self) -> Rule:
        return lambda start: old_split(start, self.length, self.share, self.grid)

    def unaligned(self) -> Rule:
        return lambda start: min(self.share, self.length - start)


@dataclass(frozen=True, slots=True)
class Cost:
    steps: int
    snapshots: frozenset[int]
    """Grid positions where a chunk ended: true states that can be kept."""


def configurations() -> Iterator[Configuration]:
    for grid in GRIDS:
        for length in LENGTHS:
            for divisor in DIVISORS:
                if STEP_TOKENS // divisor >= grid:
                    yield Configuration(grid, length, STEP_TOKENS // divisor)


def cost(configuration: Configuration, rule: Rule) -> Cost:
    position, ends = 0, []
    while position < configuration.length:
        count = rule(position)
        assert 0 < count <= configuration.share, f"{configuration}: {count} tokens at {position}"
        position += count
        ends.append(position)
    return Cost(len(ends), frozenset(end for end in ends if end % configuration.grid == 0))
