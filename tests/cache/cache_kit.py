"""Prompts with common beginnings, and what an engine's cache did with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from engine.core import EngineCore
from engine.prefix_cache.nodes import Snapshot
from engine.prefix_cache.observer import PublishRecord, ResumeRecord
from engine.request import EngineRequest, FinishedEvent, SealedEvent, StartedEvent
from tests.engine.engine_kit import Drive, MakeCore, key, prompt, request

ROOMY: dict[str, Any] = {"block_tokens": 4, "snapshot_tokens": 16, "kv_blocks": 250, "max_prefill_chunk": 16}


def family(shared: int, own: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts that begin with the same ``shared`` tokens and differ from the next one on."""
    beginning = prompt(shared, seed)
    return [(*beginning, 2 + number, *prompt(length, seed + number + 1)) for number, length in enumerate(own)]


def cached(drive: Drive, name: str | int) -> int:
    """What the cache saved the request, as its ending says; its beginning must say the same."""
    (ending,) = drive.told[key(name)].endings
    assert isinstance(ending, (FinishedEvent, SealedEvent))
    begun = [event.cached_tokens for event in drive.events if isinstance(event, StartedEvent) and event.key == key(name)]
    assert begun in ([], [ending.cached_tokens])
    return ending.cached_tokens


def one_by_one(drive: Drive, requests: Iterable[EngineRequest]) -> list[list[int]]:
    return [drive.outputs([each])[0] for each in requests]


def expected(make_core: MakeCore, requests: Iterable[EngineRequest]) -> list[list[int]]:
    """Each alone, without a cache, in whole chunks, without speculation."""
    return [Drive(make_core(speculation=0, prefix_cache=False, kv_blocks=40)).outputs([each])[0] for each in requests]


def plain_pages(make_core: MakeCore, tokens: Sequence[int], **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot [F] and blocks [n, F] after ``tokens``, computed from scratch on another engine."""
    core = make_core(prefix_cache=False, **config)
    drive = Drive(core)
    core.submit(request("plain", tokens, origin="seal"))
    drive.run()
    (sealed,) = drive.told[key("plain")].endings
    assert isinstance(sealed, SealedEvent)
    return core.pools.slots.tensor[sealed.slot].clone(), core.pools.blocks.tensor[list(sealed.blocks)].clone()


class Watcher:
    """All that the cache told."""

    def __init__(self, core: EngineCore) -> None:
        self.taken: list[PublishRecord] = []
        self.lies: list[PublishRecord] = []
        self.resumes: list[ResumeRecord] = []
        self.gone: list[Snapshot] = []
        self.states: list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = []
        """Per resume: tokens, the snapshot's slot and the blocks, copied at that time."""
        self._pools = core.pools
        core.observe(self)

    def published(self, record: PublishRecord) -> None:
        self.taken.append(record)

    def refused(self, record: PublishRecord) -> None:
        self.lies.append(record)

    def resumed(self, record: ResumeRecord) -> None:
        self.resumes.append(record)
        slot, blocks = self._pools.slots.tensor[record.snapshot.slot], self._pools.blocks.tensor[list(record.blocks)]
        self.states.append((record.tokens, slot.clone(), blocks.clone()))

    def evicted(self, snapshot: Snapshot) -> None:
        self.gone.append(snapshot)
