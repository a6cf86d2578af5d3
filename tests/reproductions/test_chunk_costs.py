"""Truth costs nothing: over all 85 configurations no more steps and no fewer states than the rule with the hole."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.config import ChunkPolicy
from tests.reproductions.chunk_costs import configurations, cost


def test_there_are_85_configurations() -> None:
    assert len(set(configurations())) == 85


@pytest.mark.parametrize("policy", ["strict", "soft"])
def test_as_many_steps_and_no_lost_states_with_the_same_backed_off_stop(policy: ChunkPolicy) -> None:
    gained = 0
    for each in configurations():
        old, ours = cost(each, each.old()), cost(each, each.ours(policy, backoff_tokens=each.grid))
        assert ours.steps == old.steps, each
        assert ours.snapshots >= old.snapshots, each
        gained += len(ours.snapshots - old.snapshots)
    assert gained == 5


@pytest.mark.parametrize("policy", ["strict", "soft"])
def test_our_hits_need_no_backed_off_stop_and_its_steps_are_saved(policy: ChunkPolicy) -> None:
    """What is lost is that stop's state alone, where nothing but a backed-off hit would land."""
    saved: Counter[int] = Counter()
    for each in configurations():
        old, ours = cost(each, each.old()), cost(each, each.ours(policy, backoff_tokens=0))
        saved[old.steps - ours.steps] += 1
        assert old.snapshots - ours.snapshots <= {each.length // each.grid * each.grid - each.grid}, each
    assert saved == {0: 56, 1: 29}


def test_the_grid_itself_costs_steps_where_a_share_is_no_multiple_of_it() -> None:
    """For honesty: against chunks of whatever the budget gives, which leave next to no state on the grid."""
    extra, states = 0, 0
    for each in configurations():
        free, ours = cost(each, each.unaligned()), cost(each, each.ours("soft", backoff_tokens=0))
        extra += ours.steps > free.steps
        states += len(ours.snapshots) - len(free.snapshots)
    assert (extra, states) == (38, 387)
