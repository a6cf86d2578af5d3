"""What a request has to offer to the cache after a step. A pure rule, and a policy: others can be put in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prefix_cache.nodes import Why


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishView:
    """One request, one step: it went from ``first`` to ``computed``, and ``slot`` holds its state."""

    first: int
    computed: int
    slot: int
    prefill: bool
    """The step was a chunk of the prefill, which ends at ``prefill_end``."""
    prefill_end: int
    grid: int
    branches: frozenset[int]
    ended: bool
    """The answer is complete."""
    previous: int | None = None
    """A slot with the state at ``first``; see ``Policies.previous_states``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """'``slot`` holds h(position)'. Whoever keeps it asks the slot's tag first (invariant 2)."""

    position: int
    slot: int
    why: Why


PublishRule = Callable[[PublishView], Sequence[Claim]]


def publish_reached(view: PublishView) -> Sequence[Claim]:
    """The position that the step ended at, if it is worth a snapshot; never one that it passed."""
    why = _reason(view)
    return () if why is None else (Claim(view.computed, view.slot, why),)


def _reason(view: PublishView) -> Why | None:
    if view.ended:
        return Why.OUTPUT
    if not view.prefill:
        return None
    if view.computed in view.branches:
        return Why.BRANCH
    if view.computed == view.prefill_end:
        return Why.PROMPT
    return Why.GRID if view.computed % view.grid == 0 else None
