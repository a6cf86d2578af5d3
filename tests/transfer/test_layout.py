"""Layouts: what they refuse, and that the digest sees everything that two processes must share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.regions import PagePart, Region
from tests.transfer.rig import make_layout
from transfer.layout import Layout

PART = PagePart(name="kv.0", offset=0, shape=(2, 3, 4), dtype="float32", num_bytes=96, partition_axis=1, partition_pieces=(1, 2))
NEXT = PagePart(name="kv.1", offset=96, shape=(4,), dtype="float32", num_bytes=16)


def region(**changes: Any) -> Region:
    fields: dict[str, Any] = {
        "name": "blocks",
        "num_pages": 3,
        "page_bytes": 112,
        "parts": (PART, NEXT),
        "memory": memoryview(bytearray(336)),
    }
    return Region(**fields | changes)


def layout(**changes: Any) -> Layout:
    return Layout(blocks=region(**changes), slots=make_layout(2, 2).slots)


def test_pages_are_slices_of_the_memory() -> None:
    made = layout()
    made.page("blocks", 2)[:] = b"x" * 112
    assert bytes(made.blocks.memory) == bytes(224) + b"x" * 112
    with pytest.raises(AssertionError):
        made.page("blocks", 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "slots"}, "region blocks is called 'slots'"),
        ({"page_bytes": 120, "memory": memoryview(bytearray(360))}, "parts end at 112, a page has 120"),
        ({"parts": (NEXT, PART)}, "part kv.1 starts at 96, the one before ends at 0"),
        ({"parts": (PART, dataclasses.replace(NEXT, offset=90))}, "part kv.1 starts at 90"),
        ({"memory": memoryview(bytearray(335))}, "memory must be 336 writable bytes"),
        ({"memory": memoryview(bytes(336))}, "writable"),
        ({"num_pages": 0, "memory": memoryview(bytearray(0))}, "0 pages"),
        ({"parts": (dataclasses.replace(PART, partition_axis=3), NEXT)}, "no axis 3"),
        ({"parts": (dataclasses.replace(PART, partition_pieces=(1, 1)), NEXT)}, "don't add up"),
        ({"parts": (dataclasses.replace(PART, partition_axis=None), NEXT)}, "pieces but no axis"),
    ],
)
def test_a_region_whose_parts_do_not_tile_its_page_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**changes)


@pytest.mark.parametrize(
    "part",
    [
        dataclasses.replace(PART, name="kv.9"),
        dataclasses.replace(PART, shape=(3, 2, 4), partition_pieces=()),
        dataclasses.replace(PART, dtype="float64"),
        dataclasses.replace(PART, partition_axis=2, partition_pieces=()),
        dataclasses.replace(PART, partition_pieces=(2, 1)),
    ],
)
def test_the_digest_sees_every_difference_of_a_part(part: PagePart) -> None:
    assert layout(parts=(part, NEXT)).digest != layout().digest


def test_the_digest_is_blind_for_the_number_of_pages_and_their_bytes() -> None:
    other = layout(num_pages=5, memory=memoryview(bytearray(b"y" * 560)))
    assert other.digest == layout().digest


def test_the_digest_is_a_fixed_one() -> None:
    """It crosses processes and versions: changing how it is made is a change of the protocol."""
    assert layout().digest == "28ee086692d5d536e9a752557bbf74db"
