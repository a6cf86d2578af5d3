"""The door for a second tier: a place for what the pools have no room for. Called on the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.prefix_cache.nodes import Salt


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEntry:
    """A snapshot and the KV in front of it."""

    salt: Salt
    tokens: tuple[int, ...]
    """[0, position)."""
    position: int
    blocks: tuple[int, ...]
    """Cover [0, position); of the last one only the positions before ``position`` mean anything."""
    slot: int


class StoredPrefix(Protocol):
    @property
    def position(self) -> int: ...

    def load(self, first_block: int, blocks: Sequence[int], slot: int) -> bool:
        """Fill ``blocks`` with the prefix's blocks from ``first_block`` on, up to the one of position-1, and the slot.

        False: it can't be had, or it isn't what was stored; then the pages' contents are nobody's. Tags are the caller's.
        """
        ...


class SecondTier(Protocol):
    def spill(self, entry: TierEntry) -> None:
        """The entry is about to be evicted: copy what shall last. Its pages can be read during the call."""
        ...

    def find(self, salt: Salt, tokens: Sequence[int], beyond: int, limit: int) -> StoredPrefix | None:
        """The deepest prefix of ``tokens`` that is stored, at a position in (beyond, limit]."""
        ...
