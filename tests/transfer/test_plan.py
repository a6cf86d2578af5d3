"""Copy plans: every needed byte exactly once, nothing else, in as few pieces as possible."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.plan import PlannedCopy, blocks_for, plan_pages


def carried(copies: Sequence[PlannedCopy]) -> list[tuple[int, int]]:
    """(source byte, target byte) of everything that the copies move."""
    return [(copy.source_offset + i, copy.target_offset + i) for copy in copies for i in range(copy.num_bytes)]


def needed(page_bytes: int, source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int]]:
    return [(s * page_bytes + i, t * page_bytes + i) for s, t in zip(source, target, strict=True) for i in range(page_bytes)]


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two lists of distinct pages of one length, with runs in them."""
    count = draw(st.integers(0, 12))
    pages = st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True)
    runs = st.integers(0, 20).map(lambda first: list(range(first, first + count)))
    return draw(pages | runs), draw(pages | runs)


@given(placements(), st.integers(1, 9), st.integers(1, 30))
def test_every_needed_byte_once_and_nothing_else(placed: tuple[list[int], list[int]], page_bytes: int, max_bytes: int) -> None:
    source, target = placed
    copies = plan_pages("blocks", page_bytes, source, target, max_bytes)
    assert sorted(carried(copies)) == sorted(needed(page_bytes, source, target))
    assert all(1 <= copy.num_bytes <= max_bytes for copy in copies)
    assert all(copy.region == "blocks" for copy in copies)


@given(placements(), st.integers(1, 9))
def test_adjacent_pages_are_one_piece(placed: tuple[list[int], list[int]], page_bytes: int) -> None:
    source, target = placed
    copies = plan_pages("slots", page_bytes, source, target, max_bytes=10**6)
    breaks = sum((s2, t2) != (s1 + 1, t1 + 1) for s1, t1, s2, t2 in zip(source, target, source[1:], target[1:], strict=False))
    assert len(copies) == (breaks + 1 if source else 0)


def test_a_long_run_is_cut_into_full_pieces() -> None:
    copies = plan_pages("blocks", 10, [3, 4, 5], [7, 8, 9], max_bytes=12)
    assert [(copy.source_offset, copy.target_offset, copy.num_bytes) for copy in copies] == [(30, 70, 12), (42, 82, 12), (54, 94, 6)]


def test_offsets_beyond_32_bits_are_exact() -> None:
    (copy,) = plan_pages("blocks", 10**6, [5000], [70000], max_bytes=10**7)
    assert (copy.source_offset, copy.target_offset) == (5 * 10**9, 7 * 10**10)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [([1, 2], [1], "2 source pages but 1 target"), ([1, 1], [2, 3], "named twice"), ([1, 2], [3, 3], "named twice")],
)
def test_lists_that_make_no_sense_are_refused(source: list[int], target: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pages("blocks", 10, source, target, 100)


@pytest.mark.parametrize(("position", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(position: int, blocks: int) -> None:
    assert blocks_for(position, 16) == blocks
