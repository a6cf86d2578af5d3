"""Report A's fault on report A's own terms: columns, the rule with the hole, and what closes it."""

from __future__ import annotations

import random

import pytest

from tests.reproductions.column_server import Lie, Prompt, Schedule, lies, old_split, random_schedule

GRID = 1600
OFFSETS = (331, 1599, 1601, 2531, 3011)


def test_364_of_2002_tokens_are_published_as_1600() -> None:
    """Other prompts leave 364 tokens of the budget; the next step crosses 1600 and the column still holds h(364)."""
    others = (Prompt(length=3000), Prompt(length=3000), Prompt(length=8192 - 6000 - 364))
    schedule = Schedule(prompts=(*others, Prompt(length=2002)), budgets=(8192,))
    assert lies(schedule, old_split, GRID) == [Lie(prompt=3, claimed=1600, held=364)]
    assert str(Lie(3, 1600, 364)) == "prompt 3: hashed as state@1600 but holds state@364"


def test_one_prompt_alone_is_safe_by_accident() -> None:
    assert not lies(Schedule(prompts=(Prompt(length=2002),), budgets=(8192,)), old_split, GRID)


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_old_rule_lies_after_every_resume_past_the_backed_off_position(offset: int) -> None:
    """4000 tokens: the last cacheable position is 1600, so that the first two offsets are still brought back to the grid."""
    resumed = Schedule(prompts=(Prompt(length=4000, start=offset),), budgets=(8192,))
    assert bool(lies(resumed, old_split, GRID)) == (offset > GRID)


def test_random_schedules_show_the_hole() -> None:
    rng = random.Random(0)
    assert sum(bool(lies(random_schedule(rng, GRID, (0, *OFFSETS)), old_split, GRID)) for _ in range(500)) > 100
