"""Who gets pages, and who gives them up. Pure functions: numbers in, indices out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_OVERTAKEN = 32
"""The fairness bound: a request that this many others have overtaken lets nobody else in before itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """An amount: what a request needs to start, or what there is room for."""

    blocks: int
    slots: int
    rows: int = 1

    def fits(self, room: Pages) -> bool:
        return self.blocks <= room.blocks and self.slots <= room.slots and self.rows <= room.rows

    def minus(self, other: Pages) -> Pages:
        return Pages(blocks=self.blocks - other.blocks, slots=self.slots - other.slots, rows=self.rows - other.rows)


def free_room(*, free_blocks: int, free_slots: int, free_rows: int, growing: int) -> Pages:
    """Room for newcomers: every request that grows keeps one free block, so that a newcomer isn't put out by its next step."""
    return Pages(blocks=free_blocks - growing, slots=free_slots, rows=free_rows)


def choose_admissions(needs: Sequence[Pages], overtaken: Sequence[int], room: Pages) -> list[int]:
    """Indices of the waiting requests to admit now, in their order.

    A request that doesn't fit doesn't block those behind it that fit (invariant 12), until MAX_OVERTAKEN have passed it:
    then the pages that come free are kept for it. As whatever was accepted fits into an empty engine, it gets its turn.
    """
    admitted: list[int] = []
    passed: list[int] = []
    for index, need in enumerate(needs):
        if need.fits(room):
            admitted.append(index)
            room = room.minus(need)
            if any(overtaken[i] + _behind(i, admitted) >= MAX_OVERTAKEN for i in passed):
                break
        else:
            passed.append(index)
            if overtaken[index] >= MAX_OVERTAKEN:
                break
    return admitted


def _behind(index: int, admitted: Sequence[int]) -> int:
    return sum(1 for other in admitted if other > index)


def choose_victim(arrivals: Sequence[int], newcomer_bound: int) -> int | None:
    """Index of the request to preempt for one that arrived at ``newcomer_bound``: the youngest, if it is younger.

    Only younger ones give way, so the oldest running request always goes on and two never put each other out in turn.
    """
    youngest = max(range(len(arrivals)), key=lambda i: arrivals[i], default=None)
    return youngest if youngest is not None and arrivals[youngest] > newcomer_bound else None
