"""Where the bytes of a block and of a slot lie, and the digest by which two processes know that they agree on it.

A page of either region is one contiguous slab: a block over all attention layers (MTP's included), a slot over all recurrent layers
with their conv windows, then the hidden tail. So page ``i`` is bytes [i * page_bytes, (i + 1) * page_bytes) of its region.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import xxhash

from protocol.regions import PagePart, Region, RegionName


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The two regions of one engine. Raises ValueError when a region's parts don't tile its page."""

    blocks: Region
    slots: Region

    def __post_init__(self) -> None:
        for region, name in ((self.blocks, "blocks"), (self.slots, "slots")):
            if region.name != name:
                raise ValueError(f"region {name} is called {region.name!r}")
            _check_region(region)

    def region(self, name: RegionName) -> Region:
        return self.blocks if name == "blocks" else self.slots

    def page(self, name: RegionName, index: int) -> memoryview:
        """The bytes of one page, writable."""
        region = self.region(name)
        assert 0 <= index < region.num_pages, f"{name}[{index}] of {region.num_pages}"
        return region.memory[index * region.page_bytes : (index + 1) * region.page_bytes]

    @property
    def digest(self) -> str:
        """xxh3-128 over order, sizes, dtypes, shapes and partition axes of all parts; the number of pages isn't part of it."""
        told = [
            {"region": region.name, "page_bytes": region.page_bytes, "parts": [asdict(part) for part in region.parts]}
            for region in (self.blocks, self.slots)
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())


def _check_region(region: Region) -> None:
    if region.page_bytes < 1 or region.num_pages < 1:
        raise ValueError(f"region {region.name}: {region.num_pages} pages of {region.page_bytes} bytes")
    if region.memory.nbytes != region.num_pages * region.page_bytes or region.memory.readonly or region.memory.format != "B":
        raise ValueError(f"region {region.name}: memory must be {region.num_pages * region.page_bytes} writable bytes")
    end = 0
    for part in region.parts:
        if part.offset != end:
            raise ValueError(f"region {region.name}: part {part.name} starts at {part.offset}, the one before ends at {end}")
        _check_partition(part)
        end += part.num_bytes
    if end != region.page_bytes:
        raise ValueError(f"region {region.name}: parts end at {end}, a page has {region.page_bytes} bytes")


def _check_partition(part: PagePart) -> None:
    if part.num_bytes < 1:
        raise ValueError(f"part {part.name} has {part.num_bytes} bytes")
    if part.partition_axis is None:
        if part.partition_pieces:
            raise ValueError(f"part {part.name} has partition pieces but no axis")
        return
    if not 0 <= part.partition_axis < len(part.shape):
        raise ValueError(f"part {part.name}: no axis {part.partition_axis} in shape {part.shape}")
    if part.partition_pieces and sum(part.partition_pieces) != part.shape[part.partition_axis]:
        raise ValueError(f"part {part.name}: pieces {part.partition_pieces} don't add up to axis {part.partition_axis} of {part.shape}")
