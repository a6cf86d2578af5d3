"""To a second tier and back: what is evicted goes there, and what a request lacks comes from there."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pools import Pools
from engine.prefix_cache.kept import Kept
from engine.prefix_cache.nodes import Snapshot, Trail, Why
from engine.prefix_cache.publishing import Claim
from engine.prefix_cache.tier import SecondTier, StoredPrefix, TierEntry


class Spilling:
    """Without a tier, nothing."""

    def __init__(self, pools: Pools, kept: Kept) -> None:
        self._blocks, self._slots = pools.blocks, pools.slots
        self._kept = kept
        self.tier: SecondTier | None = None

    def spill(self, snapshot: Snapshot) -> None:
        """A state that isn't what it claims to be goes nowhere."""
        if self.tier is not None and self._kept.holds_its_position(snapshot):
            self.tier.spill(self._entry(snapshot))

    def spill_all(self) -> None:
        """Everything that is kept, the most recently used last: it counts as the youngest there."""
        for snapshot in sorted(self._kept.tree.snapshots, key=lambda one: one.used_at):
            self.spill(snapshot)

    def _entry(self, snapshot: Snapshot) -> TierEntry:
        blocks = [node.block for node in snapshot.node.path()] + ([snapshot.partial] if snapshot.partial is not None else [])
        return TierEntry(
            salt=self._kept.tree.salt(snapshot.node),
            tokens=(*snapshot.node.prefix(), *snapshot.tail),
            position=snapshot.position,
            blocks=tuple(blocks),
            slot=snapshot.slot,
        )

    def restore(self, trail: Trail, tokens: Sequence[int], known: int, limit: int) -> None:
        """Bring back what is stored of [0, limit) beyond ``known``, if there is room that costs nobody anything."""
        stored = self.tier.find(trail.salt, tokens, known, limit) if self.tier is not None and known < limit else None
        if stored is not None:
            self._load(trail, tokens, stored)

    def _load(self, trail: Trail, tokens: Sequence[int], stored: StoredPrefix) -> None:
        """Into pages that are free or idle: what is in use stays. A prefix that can't be read is as if it weren't stored."""
        wanted = self._blocks.blocks_for(stored.position)
        held = [node.block for node in trail.nodes[:wanted]]
        missing = wanted - len(held)
        self._blocks.share(held)  # what is to be taken may not come from here
        if missing <= self._blocks.num_available and self._slots.num_available > 0:
            blocks, (slot,) = self._blocks.take(missing, held[-1] if held else None), self._slots.take(1)
            if stored.load(len(held), blocks, slot):
                self._slots.tags[slot] = stored.position
                self._keep(trail, tokens, [*held, *blocks], Claim(stored.position, slot, Why.PROMPT))
            self._blocks.give(blocks)
            self._slots.give([slot])
        self._blocks.give(held)

    def _keep(self, trail: Trail, tokens: Sequence[int], blocks: list[int], claim: Claim) -> None:
        self._kept.tree.refresh(trail)
        self._kept.keep_blocks(trail, tokens, blocks, claim.position)
        self._kept.keep_state(trail, tokens, blocks, claim)
