"""The door to what is kept: finds what a request can go on from, and takes in what it leaves, if it is true.

Sharing. Full blocks are shared as they are: nobody writes a block that the tree holds. A request whose tokens the tree has already
puts the tree's block in the place of its own. A snapshot is never written: going on from it copies its slot, and its partly filled
block if it has one (copy-on-resume).

What is true. A snapshot is taken after the step that made the state, and only of a slot whose tag says so (invariants 2, 3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.audit import AuditLog, Violation
from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.kept import Kept
from engine.prefix_cache.nodes import Hit, Salt, Snapshot, Trail
from engine.prefix_cache.observer import CacheObserver, PublishRecord, ResumeRecord
from engine.prefix_cache.publishing import Claim
from engine.prefix_cache.spilling import Spilling
from engine.prefix_cache.stats import CacheStats
from engine.prefix_cache.tier import SecondTier
from engine.request import CachedPrefix
from protocol.ids import RequestKey


@dataclass(frozen=True, slots=True)
class Who:
    """For whom the cache does something: told to observers and to the log."""

    key: RequestKey
    step: int
    story: Callable[[], str] = field(compare=False)


class PrefixCache:
    def __init__(self, pools: Pools, *, salt: Salt, max_snapshots: int, policies: Policies, audit: AuditLog) -> None:
        """``salt``: of requests that bring none of their own. ``audit`` is told of every claim that isn't true."""
        self._blocks, self._slots = pools.blocks, pools.slots
        self._salt = salt
        self._policies = policies
        self._audit = audit
        self._flushes = 0
        self._observers: list[CacheObserver] = []
        self._stats = CacheStats()
        self._kept = Kept(pools, max_snapshots, policies, self._stats, self._evicted)
        self._tree = self._kept.tree
        self._spilling = Spilling(pools, self._kept)

    # --- looking up

    def trail(self, cache_salt: str | None) -> Trail:
        return self._tree.trail(self._salt._replace(cache_salt=cache_salt))

    def look(self, trail: Trail, tokens: Sequence[int], limit: int, who: Who) -> Hit:
        """The longest KV and the deepest state of tokens [0, limit). Drops states that turn out to be lies.

        As long as nothing in the tree changes, whoever looks again is told the same: ``tokens`` of one trail only grow.
        """
        if trail.looked != (self._tree.changes, limit) or (trail.hit.snapshot is not None and self._is_lie(trail.hit.snapshot)):
            trail.hit = self._find(trail, tokens, limit, who)
            trail.looked = self._tree.changes, limit  # as they are now: a lie that was dropped is a change
        return trail.hit

    def _find(self, trail: Trail, tokens: Sequence[int], limit: int, who: Who) -> Hit:
        self._tree.follow(trail, tokens, limit)
        while (snapshot := self._tree.deepest_snapshot(trail, tokens, limit)) is not None and self._is_lie(snapshot):
            self._stats.refused_resumes += 1
            self._audit.record(_violation("resume", who, snapshot.position, self._slots.tags[snapshot.slot]))
            self._kept.evict_snapshot(snapshot)
        return Hit(tuple(trail.nodes), snapshot, len(trail.nodes) * self._tree.block_tokens)

    def peek(self, tokens: Sequence[int], limit: int, cache_salt: str | None) -> CachedPrefix:
        trail = self.trail(cache_salt)
        self._tree.follow(trail, tokens, limit)
        snapshot = self._tree.deepest_snapshot(trail, tokens, limit)
        return CachedPrefix(
            state_tokens=snapshot.position if snapshot is not None else 0, kv_tokens=len(trail.nodes) * self._tree.block_tokens
        )

    def restore(self, trail: Trail, tokens: Sequence[int], limit: int, who: Who) -> None:
        """Bring back from the second tier what it has beyond the tree, if there is room that costs nobody anything."""
        if self._spilling.tier is not None:
            self._spilling.restore(trail, tokens, self.look(trail, tokens, limit, who).state_tokens, limit)

    def idle_pages(self, hit: Hit) -> tuple[int, int]:
        """Blocks and slots that count as available now and won't when the hit is pinned."""
        first = bisect_left(hit.nodes, True, key=lambda node: self._blocks.is_idle(node.block))  # behind an idle block all are
        counted = hit.covering is not None and hit.covering.block == hit.partial
        partial = hit.partial is not None and not counted and self._blocks.is_idle(hit.partial)
        state = hit.snapshot is not None and self._slots.is_idle(hit.snapshot.slot)
        return len(hit.nodes) - first + partial, int(state)

    # --- going on from it

    def pin(self, hit: Hit, trail: Trail) -> None:
        """The request uses the nodes' blocks from now on. Until ``resume`` or ``unpin``, nothing of the hit goes."""
        trail.nodes[:] = hit.nodes
        trail.flushes = self._flushes
        self._blocks.share(hit.blocks)
        if hit.partial is not None:
            self._blocks.share([hit.partial])
        if hit.snapshot is not None:
            self._slots.share([hit.snapshot.slot])
        self._kept.touch_end(hit.nodes)

    def unpin(self, hit: Hit) -> None:
        """The state isn't wanted (any more). The nodes' blocks are the request's to give back."""
        if hit.partial is not None:
            self._blocks.give([hit.partial])
        if hit.snapshot is not None:
            self._slots.give([hit.snapshot.slot])

    def resume(self, hit: Hit, trail: Trail, tokens: Sequence[int], blocks: Sequence[int], slot: int, who: Who) -> None:
        """Copy the state, and the partly filled block, into pages of the request's own."""
        snapshot = hit.snapshot
        assert snapshot is not None, "no state to go on from"
        position = snapshot.position
        self._slots.copy(snapshot.slot, slot)
        if not self._policies.enforce_tags:
            self._slots.tags[slot] = position  # believed
        if hit.partial is not None and hit.covering is None:
            self._blocks.copy(hit.partial, blocks[position // self._tree.block_tokens])
        self.unpin(hit)
        self._kept.touch(snapshot)
        snapshot.hits += 1
        for observer in self._observers:
            observer.resumed(
                ResumeRecord(
                    key=who.key,
                    story=who.story(),
                    step=who.step,
                    claimed=position,
                    held=self._slots.tags[snapshot.slot],
                    snapshot=snapshot,
                    tokens=tuple(tokens[:position]),
                    blocks=tuple(blocks[: self._blocks.blocks_for(position)]),
                    salt=trail.salt,
                )
            )

    def count_lookup(self, hit: Hit, *, lands: bool) -> None:
        """``lands``: the rest comes from a peer, and nothing is computed again."""
        self._stats.lookups += 1
        self._stats.hits += hit.snapshot is not None
        self._stats.hit_tokens += hit.state_tokens
        self._stats.replay_tokens += 0 if lands else max(hit.kv_tokens - hit.state_tokens, 0)

    def count_wait(self) -> None:
        self._stats.waits += 1

    # --- keeping

    def takes_from(self, trail: Trail) -> bool:
        """Whether states of a running request can be kept: the others' waits for them would be in vain."""
        return trail.flushes == self._flushes and self._kept.max_snapshots > 0

    def publish(self, trail: Trail, tokens: Sequence[int], blocks: list[int], known: int, claims: Sequence[Claim], who: Who) -> None:
        """Keep the full blocks of [0, known), and the states that are claimed and true.

        KV and MTP KV of [0, known) are final. Where the tree has a block for the same tokens already, it takes the place of the
        request's own in ``blocks``.
        """
        if trail.flushes != self._flushes:
            return  # what the request was built on is forgotten, and so is the rest
        self._tree.refresh(trail)
        self._kept.keep_blocks(trail, tokens, blocks, known)
        for claim in claims:
            self._publish_state(trail, tokens, blocks, claim, who)

    def _publish_state(self, trail: Trail, tokens: Sequence[int], blocks: Sequence[int], claim: Claim, who: Who) -> None:
        held = self._slots.tags[claim.slot]
        record = PublishRecord(
            key=who.key, story=who.story(), step=who.step, claimed=claim.position, held=held, slot=claim.slot, why=claim.why
        )
        if held != claim.position:
            self._stats.refused_publishes += 1
            self._audit.record(_violation("publish", who, claim.position, held))
            for observer in self._observers:
                observer.refused(record)
            if self._policies.enforce_tags:
                return
        if self._kept.keep_state(trail, tokens, blocks, claim):
            for observer in self._observers:
                observer.published(record)

    # --- giving up

    def flush(self) -> int:
        """Forget everything; returns how many blocks and snapshots that were. Pages in use come back when their users are done."""
        self._flushes += 1
        return self._kept.flush()

    def spill_all(self) -> None:
        """Everything that is kept goes to the second tier as well."""
        self._spilling.spill_all()

    def _evicted(self, snapshot: Snapshot) -> None:
        for observer in self._observers:
            observer.evicted(snapshot)
        self._spilling.spill(snapshot)

    # --- what is told

    def observe(self, observer: CacheObserver) -> None:
        self._observers.append(observer)

    def attach_tier(self, tier: SecondTier | None) -> None:
        self._spilling.tier = tier

    def stats(self) -> CacheStats:
        self._stats.blocks = self._tree.num_nodes
        self._stats.snapshots = len(self._tree.snapshots)
        self._stats.kv_bytes = self._blocks.num_kept * self._blocks.block_bytes
        self._stats.snapshot_bytes = len(self._tree.snapshots) * self._slots.slot_bytes
        return replace(self._stats)

    def check_integrity(self) -> tuple[list[int], list[int]]:
        """The kept blocks (once per hold) and slots. Raises AssertionError when the cache contradicts itself."""
        return self._kept.check_integrity()

    def _is_lie(self, snapshot: Snapshot) -> bool:
        return self._policies.enforce_tags and not self._kept.holds_its_position(snapshot)


def _violation(purpose: str, who: Who, claimed: int, held: int | None) -> Violation:
    return Violation(purpose=purpose, request_id=who.key.request_id, step=who.step, claimed=claimed, held=held, story=who.story())
