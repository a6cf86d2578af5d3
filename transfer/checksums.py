"""xxh3 over pages and tokens. Pages are hashed while they arrive, piece by piece, when the bytes are still in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from protocol.regions import RegionName
from transfer.layout import Layout


def token_digest(token_ids: Sequence[int]) -> str:
    """xxh3-128 of the tokens as little-endian int64, in hex."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i8").tobytes())


def page_checksum(page: memoryview) -> int:
    """xxh3-64 of one page."""
    return xxhash.xxh3_64_intdigest(page)


def page_checksums(layout: Layout, region: RegionName, pages: Iterable[int]) -> tuple[int, ...]:
    """Of each page in order. Gives up the interpreter lock while it hashes, so it may run in a thread."""
    return tuple(page_checksum(layout.page(region, page)) for page in pages)


class ArrivingPages:
    """Checksums of one region's pages from pieces that arrive in any order; a page's pieces are hashed as soon as they join its start.

    ``arrived`` only once a piece's bytes are final.
    """

    def __init__(self, layout: Layout, region: RegionName) -> None:
        self._memory, self._page_bytes = layout.region(region).memory, layout.region(region).page_bytes
        self._whole: dict[int, int] = {}
        self._partly: dict[int, _ArrivingPage] = {}

    def arrived(self, offset: int, num_bytes: int) -> None:
        """A piece, in bytes of the region; it may span pages."""
        page_bytes, end = self._page_bytes, offset + num_bytes
        while offset < end:
            page = offset // page_bytes
            first = page * page_bytes
            stop = min(end, first + page_bytes)
            if stop - offset == page_bytes:
                self._whole[page] = page_checksum(self._memory[first:stop])
            else:
                self._add(page, offset - first, stop - first)
            offset = stop

    def checksum(self, page: int) -> int | None:
        """None: not all of it has arrived."""
        return self._whole.get(page)

    def _add(self, page: int, start: int, stop: int) -> None:
        if page not in self._partly:
            self._partly[page] = _ArrivingPage(self._memory[page * self._page_bytes : (page + 1) * self._page_bytes])
        checksum = self._partly[page].add(start, stop)
        if checksum is not None:
            self._whole[page] = checksum
            del self._partly[page]


class _ArrivingPage:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._hasher = xxhash.xxh3_64()
        self._hashed = 0
        self._waiting: dict[int, int] = {}  # start -> stop of pieces that don't join yet

    def add(self, start: int, stop: int) -> int | None:
        """The checksum, with the last piece."""
        self._waiting[start] = stop
        while (joined := self._waiting.pop(self._hashed, None)) is not None:
            self._hasher.update(self._memory[self._hashed : joined])
            self._hashed = joined
        return self._hasher.intdigest() if self._hashed == self._memory.nbytes else None
