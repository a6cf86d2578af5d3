"""How a page of memory describes its inside: said by the engine's pools, read by the transfer layer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RegionName = Literal["blocks", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """One tensor inside a page, at ``offset`` bytes from the page's start, in C order."""

    name: str
    """For instance 'kv.3', 'conv.0', 'ssm.0', 'hidden'."""
    offset: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    partition_axis: int | None = None
    """Axis that tensor parallelism would cut (heads, channels); None when every rank holds the whole."""
    partition_pieces: tuple[int, ...] = ()
    """Lengths along that axis that must be cut one by one (conv: x | B | C); empty: the axis is one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A pool as raw memory: ``num_pages`` pages of ``page_bytes`` each, adjacent, plus what a page contains."""

    name: RegionName
    num_pages: int
    page_bytes: int
    parts: tuple[PagePart, ...]
    memory: memoryview
    """All bytes, writable, format 'B'. Valid as long as the pool lives."""
