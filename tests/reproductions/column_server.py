"""Report A's server in small: which state its block-table columns hold, and which one it says they hold.

Column p is published as "the state after (p+1)·grid tokens". Nothing looks at what is in it: that the claim is true rests on
where chunks end, and that rests on a split rule. Here the rule is a parameter, and the oracle is the table itself: every
column carries the position that a kernel would have left in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Split(Protocol):
    def __call__(self, start: int, target: int, budget: int, grid: int) -> int:
        """Tokens of the next chunk of a prompt that is computed to ``start`` and shall be computed to ``target``; 0 defers it."""
        ...


def old_split(start: int, target: int, budget: int, grid: int) -> int:
    """The rule with the hole: chunk ends are kept on the grid only below the drafter's backed-off last cacheable position.

    That position is 0 for prompts shorter than two grid steps, and from it on a chunk may end, and start, anywhere.
    """
    last_cacheable = max(target // grid * grid - grid, 0)
    end = start + min(budget, target - start)
    if start >= last_cacheable:
        return end - start
    if start % grid > 0:
        end = min(end, (start // grid + 1) * grid)
    end = min(end, last_cacheable) // grid * grid
    return max(end - start, 0)


@dataclass(frozen=True, slots=True)
class Prompt:
    length: int
    start: int = 0
    """Tokens whose state it has on arrival, from a cache or from a peer."""
    arrival: int = 0
    """The step before which it comes."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Prompts that share each step's budget in order of arrival. Step i has ``budgets[i % len(budgets)]`` tokens."""

    prompts: tuple[Prompt, ...]
    budgets: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Lie:
    """A published entry that isn't what it says."""

    prompt: int
    claimed: int
    held: int

    def __str__(self) -> str:
        return f"prompt {self.prompt}: hashed as state@{self.claimed} but holds state@{self.held}"


@dataclass
class _Running:
    prompt: Prompt
    columns: dict[int, int] = field(default_factory=dict)
    """Column to the position whose state it holds; columns that no chunk ended in are null."""
    computed: int = 0

    def begin(self, grid: int) -> None:
        self.computed = self.prompt.start
        if self.computed > 0:
            self.columns[(self.computed - 1) // grid] = self.computed

    def compute(self, count: int, grid: int) -> None:
        """The kernel reads the column of the last token before the chunk, and writes that of the chunk's last token."""
        self.computed += count
        self.columns[(self.computed - 1) // grid] = self.computed

    def published(self, grid: int) -> Iterator[tuple[int, int]]:
        """(claimed, held) of every full column that isn't null."""
        for column, held in self.columns.items():
            if (column + 1) * grid <= self.computed:
                yield (column + 1) * grid, held


def lies(schedule: Schedule, split: Split, grid: int, *, max_steps: int = 10_000) -> list[Lie]:
    """Run the schedule to its end; every entry that was published and isn't true.

    Raises AssertionError when prompts are still unfinished after ``max_steps``.
    """
    running = [_Running(prompt) for prompt in schedule.prompts]
    found: set[Lie] = set()
    for step in range(max_steps):
        budget = schedule.budgets[step % len(schedule.budgets)]
        for index, each in enumerate(running):
            if each.prompt.arrival == step:
                each.begin(grid)
            if each.prompt.arrival > step or each.computed == each.prompt.length:
                continue
            count = split(each.computed, each.prompt.length, budget, grid)
            assert 0 <= count <= budget, f"a chunk of {count} tokens for a budget of {budget}"
            budget -= count
            if count > 0:
                each.compute(count, grid)
            found |= {Lie(index, claimed, held) for claimed, held in each.published(grid) if claimed != held}
        if all(each.computed == each.prompt.length for each in running):
            return sorted(found)
    raise AssertionError(f"not done after {max_steps} steps: {[(each.computed, each.prompt.length) for each in running]}")


def random_schedule(rng: random.Random, grid: int, starts: Sequence[int]) -> Schedule:
    """Two to five prompts of up to four grid steps over one budget that changes from step to step; some resume at ``starts``.

    Each step has at least one grid step's tokens: less could never bring a chunk from one grid line to the next.
    """
    prompts = []
    for _ in range(rng.randint(2, 5)):
        start = rng.choice(starts)
        prompts.append(Prompt(length=start + rng.randint(1, 4 * grid), start=start, arrival=rng.randint(0, 3)))
    prompts.sort(key=lambda prompt: prompt.arrival)
    return Schedule(prompts=tuple(prompts), budgets=tuple(rng.randint(grid, 5 * grid) for _ in range(rng.randint(1, 4))))
