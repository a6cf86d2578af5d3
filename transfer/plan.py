"""Which bytes go where: pure arithmetic from page ids at both ends to a list of contiguous copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.regions import RegionName


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """``num_bytes`` from ``source_offset`` in P's region to ``target_offset`` in D's region of the same name."""

    region: RegionName
    source_offset: int
    target_offset: int
    num_bytes: int


def plan_pages(region: RegionName, page_bytes: int, source: Sequence[int], target: Sequence[int], max_bytes: int) -> list[PlannedCopy]:
    """Page ``source[i]`` at P goes to page ``target[i]`` at D.

    Runs adjacent at both ends become one piece; pieces longer than ``max_bytes`` are cut, from their start, so that every cut but
    the last of a run is full. Raises ValueError when the lists differ in length or name a page twice.
    """
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source pages but {len(target)} target pages of {region}")
    if len(set(source)) != len(source) or len(set(target)) != len(target):
        raise ValueError(f"a page of {region} is named twice")
    copies = []
    for first, count in _runs(source, target):
        length = count * page_bytes
        for start in range(0, length, max_bytes):
            copies.append(
                PlannedCopy(region, source[first] * page_bytes + start, target[first] * page_bytes + start, min(max_bytes, length - start))
            )
    return copies


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first index, length) of each longest stretch in which both lists count up by one."""
    first = 0
    for index in range(1, len(source) + 1):
        ends = index == len(source) or source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1
        if ends:
            yield first, index - first
            first = index


def cut(num_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """(start, length) of the messages that carry a copy. Both ends cut alike; message i goes under the copy's tag + i."""
    return [(start, min(max_bytes, num_bytes - start)) for start in range(0, num_bytes, max_bytes)]


def blocks_for(position: int, block_tokens: int) -> int:
    """How many blocks hold positions [0, position)."""
    return -(-position // block_tokens)
