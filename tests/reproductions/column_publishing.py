"""The fault of report A, on our engine: states are published by block-table column, from chunks that end wherever the old rule lets them.

A chunk reads the column of the last token before it and writes that of its last token. When it crosses a grid line from within
a column, that column still holds the state the chunk began with, and is published as the state at the line.

    --policies tests.reproductions.column_publishing:REFUSED     our tags contradict the claims: refused, counted, told
    --policies tests.reproductions.column_publishing:BELIEVED    the claims are believed, as if there were no tags
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.planner import ChunkRule
from engine.policies import Policies
from engine.prefix_cache.nodes import Why
from engine.prefix_cache.publishing import Claim, PublishView, publish_reached
from tests.reproductions.column_server import old_split


def old_chunk(rule: ChunkRule, *, start: int, target: int, budget: int, branches: Sequence[int] = ()) -> int:
    """The old rule under our planner's name. It knows no branch points."""
    if start == target:
        return rule.tail_tokens if rule.tail_tokens <= budget else 0
    return old_split(start, target, max(0, min(budget, rule.max_chunk)), rule.grid)


def publish_columns(view: PublishView) -> Sequence[Claim]:
    """Every column that the step filled and that isn't null, under its own end."""
    line = (view.first // view.grid + 1) * view.grid
    claims = []
    if view.previous is not None and view.first % view.grid > 0 and view.computed > line:
        claims.append(Claim(line, view.previous, Why.GRID))
    if view.prefill and view.computed % view.grid == 0:
        claims.append(Claim(view.computed, view.slot, Why.GRID))
    return claims


def publish_columns_and_ends(view: PublishView) -> Sequence[Claim]:
    """Partial hits on: also the state at a prompt's and an answer's end, wherever that is."""
    found = publish_columns(view)
    known = {claim.position for claim in found}
    return [*found, *(claim for claim in publish_reached(view) if claim.position not in known)]


REFUSED = Policies(plan_chunk=old_chunk, publish=publish_columns_and_ends, previous_states=True)
BELIEVED = replace(REFUSED, enforce_tags=False)
