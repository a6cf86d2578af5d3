"""Checksums of arriving pages equal those of whole ones, however the pieces come."""

from __future__ import annotations

import random
import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.rig import fill_random, make_layout
from transfer.checksums import ArrivingPages, page_checksum, page_checksums, token_digest


def test_the_token_digest_is_over_little_endian_int64() -> None:
    assert token_digest([1, 2, 300_000]) == xxhash.xxh3_128_hexdigest(struct.pack("<3q", 1, 2, 300_000))
    assert token_digest(range(3)) == token_digest((0, 1, 2)) != token_digest((0, 1))
    assert token_digest([]) == xxhash.xxh3_128_hexdigest(b"")


@given(st.integers(0, 10**6), st.integers(1, 40), st.booleans())
def test_pieces_in_any_order_give_the_checksums_of_whole_pages(seed: int, piece: int, shuffled: bool) -> None:
    draw = random.Random(seed)
    layout = make_layout(6, 2, block_bytes=24)
    fill_random(layout, draw)
    pieces = [(offset, min(piece, 5 * 24 - offset)) for offset in range(0, 5 * 24, piece)]
    if shuffled:
        draw.shuffle(pieces)
    arriving = ArrivingPages(layout, "blocks")
    for offset, num_bytes in pieces:
        arriving.arrived(offset, num_bytes)
    assert tuple(arriving.checksum(page) for page in range(5)) == page_checksums(layout, "blocks", range(5))
    assert arriving.checksum(5) is None


def test_a_page_without_its_last_byte_has_no_checksum() -> None:
    layout = make_layout(2, 2, block_bytes=24)
    arriving = ArrivingPages(layout, "blocks")
    arriving.arrived(24, 23)
    assert arriving.checksum(1) is None
    arriving.arrived(47, 1)
    assert arriving.checksum(1) == page_checksum(layout.page("blocks", 1))


def test_one_bit_changes_a_checksum() -> None:
    page = memoryview(bytearray(1000))
    before = page_checksum(page)
    page[777] ^= 4
    assert page_checksum(page) != before
