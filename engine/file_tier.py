"""The prefix cache's second tier in files: a snapshot that must go leaves with the KV before it, and both are found again by tokens.

    block-<digest of tokens [0, end)>                      one block's KV, shared by all prefixes that begin so
    snapshot-<digest of its full blocks><digest of all>    the slot and, when the position is inside a block, that block's KV

Digests are blake2b, seeded with the salt: two prefixes can't be mistaken for each other, by accident or on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.models.info import ModelInfo
from engine.page_file import PageName
from engine.pools import Pools
from engine.prefix_cache.nodes import Salt
from engine.prefix_cache.tier import TierEntry
from engine.snapshot_files import SnapshotFiles
from protocol.regions import Region

DIGEST_BYTES = 16
_SLACK = 1024
"""How many index entries of files that are gone may lie around."""


def page_fingerprint(info: ModelInfo, pools: Pools) -> bytes:
    """16 bytes over all that decides what a page's bytes mean: the model, its weights, dtype, and where each layer's part lies."""
    parts = [(region.page_bytes, region.parts) for region in pools.regions()]
    told = (info.model_type, info.config_digest, info.weights_digest, info.has_mtp, info.dtype, pools.blocks.block_tokens, parts)
    return blake2b(repr(told).encode(), digest_size=DIGEST_BYTES).digest()


class PrefixDigests:
    """Digests of one token sequence's prefixes, cheap for every block's end and for single positions."""

    def __init__(self, salt: Salt, tokens: Sequence[int], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._bytes = np.asarray(tokens, dtype="<i8").tobytes()
        hasher = blake2b(repr(tuple(salt)).encode(), digest_size=DIGEST_BYTES)
        self._hashers = [hasher]
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            hasher = hasher.copy()
            hasher.update(self._cut(start, start + block_tokens))
            self._hashers.append(hasher)

    def block(self, index: int) -> PageName:
        return PageName("block", self._hashers[index + 1].digest(), (index + 1) * self._block_tokens)

    def snapshot(self, position: int) -> PageName:
        full = position // self._block_tokens
        exact = self._hashers[full].copy()
        exact.update(self._cut(full * self._block_tokens, position))
        return PageName("snapshot", self.full_blocks(full) + exact.digest(), position)

    def full_blocks(self, count: int) -> bytes:
        return self._hashers[count].digest()

    def _cut(self, start: int, end: int) -> bytes:
        return self._bytes[8 * start : 8 * end]


class FileTier:
    """Give it to ``EngineCore.attach_tier``; ``close`` it after the engine's last step."""

    def __init__(self, files: SnapshotFiles, pools: Pools) -> None:
        self._files = files
        self._block_tokens = pools.blocks.block_tokens
        self._blocks, self._slots = pools.regions()
        self._by_prefix: dict[bytes, set[int]] = {}
        """Digest of a snapshot's full blocks -> positions of snapshots behind them."""
        self._num_indexed = 0
        self._index()

    def spill(self, entry: TierEntry) -> None:
        """Copies what has no file yet; files are written by another thread."""
        digests = PrefixDigests(entry.salt, entry.tokens, self._block_tokens)
        full = entry.position // self._block_tokens
        for index in range(full):
            self._files.put(digests.block(index), _page(self._blocks, entry.blocks[index]))
        name = digests.snapshot(entry.position)
        self._files.put(name, _page(self._slots, entry.slot), *(_page(self._blocks, block) for block in entry.blocks[full:]))
        self._add(name)

    def find(self, salt: Salt, tokens: Sequence[int], beyond: int, limit: int) -> StoredFilePrefix | None:
        """The deepest stored position in (beyond, limit] whose tokens are the first of ``tokens``, with all KV behind ``beyond``."""
        if len(self._files) == 0 or limit <= beyond:
            return None
        digests = PrefixDigests(salt, tokens[:limit], self._block_tokens)
        for position in self._positions(digests, beyond, limit):
            blocks = range(beyond // self._block_tokens, position // self._block_tokens)
            if self._files.has(digests.snapshot(position)) and all(self._files.has(digests.block(index)) for index in blocks):
                return StoredFilePrefix(position, self, digests)
        return None

    def _positions(self, digests: PrefixDigests, beyond: int, limit: int) -> Iterator[int]:
        """Candidates, the deepest first."""
        for full in range(limit // self._block_tokens, beyond // self._block_tokens - 1, -1):
            known = self._by_prefix.get(digests.full_blocks(full), ())
            yield from sorted((position for position in known if beyond < position <= limit), reverse=True)

    def load(self, digests: PrefixDigests, position: int, first_block: int, blocks: Sequence[int], slot: int) -> bool:
        num_full = max(0, position // self._block_tokens - first_block)
        for offset, block in enumerate(blocks[:num_full]):
            if not self._files.read(digests.block(first_block + offset), _page(self._blocks, block)):
                return False
        rest = [_page(self._blocks, block) for block in blocks[num_full:]]
        if position % self._block_tokens > 0 and not rest:  # the tree has a full block there; ours is in the file all the same
            rest = [memoryview(bytearray(self._blocks.page_bytes))]
        return self._files.read(digests.snapshot(position), _page(self._slots, slot), *rest)

    def counters(self) -> dict[str, float]:
        """Totals and gauges, by metric name."""
        totals = {f"baton_tier_{key}_pages_total": float(count) for key, count in self._files.counts().items()}
        return totals | {"baton_tier_bytes": float(self._files.num_bytes)}

    def clear(self) -> None:
        """Forget everything."""
        self._files.clear()
        self._index()

    def leave(self) -> None:
        """The end is near: what is spilled from now on waits for the disk, within bounds, instead of being dropped."""
        self._files.leave()

    def close(self) -> None:
        self._files.close()

    def _index(self) -> None:
        self._by_prefix.clear()
        self._num_indexed = 0
        for name in self._files.names():
            if name.kind == "snapshot":
                self._add(name)

    def _add(self, name: PageName) -> None:
        if self._num_indexed > 2 * len(self._files) + _SLACK:  # files have gone: forget them
            self._index()
        positions = self._by_prefix.setdefault(name.digest[:DIGEST_BYTES], set())
        self._num_indexed += name.position not in positions
        positions.add(name.position)


@dataclass(frozen=True, slots=True)
class StoredFilePrefix:
    position: int
    _tier: FileTier
    _digests: PrefixDigests

    def load(self, first_block: int, blocks: Sequence[int], slot: int) -> bool:
        """Fill pages: blocks[i] with the KV of block first_block+i, ``slot`` with the state. False: something was wrong with a file,
        and none of the pages may be used."""
        return self._tier.load(self._digests, self.position, first_block, blocks, slot)


def open_file_tier(directory: Path, max_bytes: int, info: ModelInfo, pools: Pools) -> FileTier:
    """Raises OSError when the directory can't be used."""
    return FileTier(SnapshotFiles(directory, page_fingerprint(info, pools), max_bytes), pools)


def _page(region: Region, page: int) -> memoryview:
    return region.memory[page * region.page_bytes : (page + 1) * region.page_bytes]
