"""The audit's door: what the cache did, with the story of the request that it did it for.

Methods are called on the engine's thread, between kernels, and must not raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.prefix_cache.nodes import Salt, Snapshot, Why
from protocol.ids import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRecord:
    key: RequestKey
    story: str
    step: int
    claimed: int
    """The position under which the state is, or would have been, found."""
    held: int | None
    """The slot's tag: the position that it truly holds."""
    slot: int
    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord:
    key: RequestKey
    story: str
    step: int
    claimed: int
    held: int | None
    snapshot: Snapshot
    tokens: tuple[int, ...]
    """[0, claimed)."""
    blocks: tuple[int, ...]
    """Cover [0, claimed); theirs and the snapshot's contents are to be read during the call only."""
    salt: Salt


class CacheObserver(Protocol):
    def published(self, record: PublishRecord) -> None:
        """A snapshot was taken."""
        ...

    def refused(self, record: PublishRecord) -> None:
        """A claim whose slot holds something else: not taken, unless ``enforce_tags`` is off."""
        ...

    def resumed(self, record: ResumeRecord) -> None:
        """A request goes on from a snapshot."""
        ...

    def evicted(self, snapshot: Snapshot) -> None:
        """It is about to go; its pages can still be read during the call."""
        ...
