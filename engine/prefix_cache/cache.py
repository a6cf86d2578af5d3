"""The owner of kept pages: finds what a request can go on from, keeps what it leaves, and gives up what is worth least.

Sharing. Full blocks are shared as they are: nobody writes a block that the tree holds. A request whose tokens the tree has already
puts the tree's block in the place of its own, so the first blocks of every request that publishes are the tree's, and whatever
lies behind a node that is in use is in use as well, or idle: idle pages can always be given up from the leaves on.
A snapshot is never written: going on from it copies its slot, and its partly filled block if it has one (copy-on-resume).

What is true. A snapshot is taken after the step that made the state, and only of a slot whose tag says so (invariants 2, 3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.audit import AuditLog, Violation
from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.nodes import Hit, Node, Salt, Snapshot, Trail, Why
from engine.prefix_cache.observer import CacheObserver, PublishRecord, ResumeRecord
from engine.prefix_cache.publishing import Claim
from engine.prefix_cache.stats import CacheStats
from engine.prefix_cache.tier import SecondTier, StoredPrefix, TierEntry
from engine.prefix_cache.tree import Tree
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
        self._max_snapshots = max_snapshots
        self._policies = policies
        self._audit = audit
        self._tree = Tree(pools.blocks.block_tokens)
        self._bare: OrderedDict[Node, None] = OrderedDict()
        """Leaves without a snapshot, the least recently used first."""
        self._clock = 0.0
        self._uses = 0
        self._flushes = 0
        self._observers: list[CacheObserver] = []
        self._tier: SecondTier | None = None
        self._stats = CacheStats()
        pools.blocks.reclaim = self._free_blocks
        pools.slots.reclaim = self._free_slots

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
            self._evict_snapshot(snapshot)
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
        if self._tier is None:
            return
        known = self.look(trail, tokens, limit, who).state_tokens
        stored = self._tier.find(trail.salt, tokens, known, limit) if known < limit else None
        if stored is not None:
            self._load(trail, tokens, stored)

    def idle_pages(self, hit: Hit) -> tuple[int, int]:
        """Blocks and slots that count as available now and won't when the hit is pinned."""
        first = bisect_left(hit.nodes, True, key=lambda node: self._blocks.is_idle(node.block))  # behind an idle block all are
        partial = hit.partial is not None and self._blocks.is_idle(hit.partial)
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
        for node in hit.nodes[-1:]:
            if node in self._bare:
                self._bare.move_to_end(node)

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
        if hit.partial is not None:
            self._blocks.copy(hit.partial, blocks[position // self._tree.block_tokens])
        self.unpin(hit)
        self._touch(snapshot)
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

    def count_lookup(self, hit: Hit) -> None:
        self._stats.lookups += 1
        self._stats.hits += hit.snapshot is not None
        self._stats.hit_tokens += hit.state_tokens
        self._stats.replay_tokens += max(hit.kv_tokens - hit.state_tokens, 0)

    def count_wait(self) -> None:
        self._stats.waits += 1

    # --- keeping

    def publish(self, trail: Trail, tokens: Sequence[int], blocks: list[int], known: int, claims: Sequence[Claim], who: Who) -> None:
        """Keep the full blocks of [0, known), and the states that are claimed and true.

        KV and MTP KV of [0, known) are final. Where the tree has a block for the same tokens already, it takes the place of the
        request's own in ``blocks``.
        """
        if trail.flushes != self._flushes:
            return  # what the request was built on is forgotten, and so is the rest
        self._tree.refresh(trail)
        self._publish_blocks(trail, tokens, blocks, known)
        for claim in claims:
            self._publish_state(trail, tokens, blocks, claim, who)

    def _publish_blocks(self, trail: Trail, tokens: Sequence[int], blocks: list[int], known: int) -> None:
        size = self._tree.block_tokens
        for index in range(len(trail.nodes), known // size):
            own, block = tuple(tokens[index * size : (index + 1) * size]), blocks[index]
            node = trail.end.children.get(own)
            if node is None:
                node = self._add_node(trail, own, block)
            elif node.block != block:
                self._blocks.share([node.block])
                self._blocks.give([block])
                blocks[index] = node.block
            trail.nodes.append(node)

    def _add_node(self, trail: Trail, tokens: tuple[int, ...], block: int) -> Node:
        self._tree.plant(trail)
        parent = trail.end
        node = self._tree.add_node(parent, tokens, block)
        self._blocks.keep(block)
        self._bare.pop(parent, None)
        self._bare[node] = None
        self._stats.published_blocks += 1
        return node

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
        depth = claim.position // self._tree.block_tokens
        node = trail.at(depth)
        tail = tuple(tokens[depth * self._tree.block_tokens : claim.position])
        there = node.snapshots.get(tail)
        if there is not None:
            self._touch(there)
        elif self._keep_state(trail, node, tail, claim, blocks[depth] if tail else None):
            for observer in self._observers:
                observer.published(record)

    def _keep_state(self, trail: Trail, node: Node, tail: tuple[int, ...], claim: Claim, partial: int | None) -> bool:
        new = self._tree.propose(node, tail, claim.slot, partial, claim.why)
        new.clock, new.used_at = self._clock, self._uses
        if not self._make_room(new):
            self._stats.unworthy_snapshots += 1
            return False
        (slot,) = self._slots.take(1)
        self._slots.copy(claim.slot, slot)
        self._slots.keep(slot)
        self._slots.give([slot])
        new.slot = slot
        self._add_snapshot(trail, new)
        return True

    def _add_snapshot(self, trail: Trail, new: Snapshot) -> None:
        if not new.node.alive:  # the root went with the last snapshot that had to make room
            self._tree.plant(trail)
            new.node = trail.root
        self._tree.add_snapshot(new)
        if new.partial is not None:
            self._blocks.keep(new.partial)
        self._bare.pop(new.node, None)
        self._stats.published_snapshots += 1
        self._touch(new)

    def _make_room(self, new: Snapshot) -> bool:
        """A slot for one more snapshot, unless all that are there are worth more."""
        full = len(self._tree.snapshots) >= self._max_snapshots
        if not full and self._slots.num_free > 0:
            return True
        victim = self._least_valuable()
        if victim is None or self._max_snapshots == 0:
            return False
        score = self._policies.score
        if score(victim) > score(new):
            return False
        self._evict_least(victim)
        return self._slots.num_free > 0

    # --- giving up

    def flush(self) -> int:
        """Forget everything; returns how many blocks and snapshots that were. Pages in use come back when their users are done."""
        dropped = self._tree.num_nodes + len(self._tree.snapshots)
        for snapshot in list(self._tree.snapshots):
            self._drop_snapshot(snapshot)
        while self._bare:
            self._drop_node(next(iter(self._bare)))
        self._flushes += 1
        return dropped

    def _free_blocks(self, count: int) -> None:
        """The pool's ``reclaim``: bare leaves first, as they save no computation, then whole ends of the tree by age: a block saves
        as many tokens as any other."""
        enough = self._blocks.num_free + count
        while self._blocks.num_free < enough:
            leaf = next((node for node in self._bare if self._blocks.is_idle(node.block)), None)
            if leaf is not None:
                self._stats.evicted_blocks += 1
                self._drop_node(leaf)
                continue
            ends = filter(self._holds_blocks, self._tree.snapshots)
            self._evict_snapshot(min(ends, key=lambda snapshot: snapshot.used_at))

    def _holds_blocks(self, snapshot: Snapshot) -> bool:
        """Whether blocks come free with this snapshot, at once or when its node goes."""
        if not self._slots.is_idle(snapshot.slot):
            return False
        leaf = snapshot.node.depth > 0 and not snapshot.node.children and self._blocks.is_idle(snapshot.node.block)
        return leaf or (snapshot.partial is not None and self._blocks.is_idle(snapshot.partial))

    def _free_slots(self, count: int) -> None:
        """The pool's ``reclaim``."""
        for _ in range(count):
            snapshot = self._least_valuable()
            assert snapshot is not None, "idle slots that nothing gives up"
            self._evict_least(snapshot)

    def _least_valuable(self) -> Snapshot | None:
        idle = (snapshot for snapshot in self._tree.snapshots if self._slots.is_idle(snapshot.slot))
        return min(idle, key=self._policies.score, default=None)

    def _evict_least(self, snapshot: Snapshot) -> None:
        """What is kept or used from now on starts where this one ends."""
        self._clock = max(self._clock, self._policies.score(snapshot))
        self._evict_snapshot(snapshot)

    def _evict_snapshot(self, snapshot: Snapshot) -> None:
        self._stats.evicted_snapshots += 1
        for observer in self._observers:
            observer.evicted(snapshot)
        if self._tier is not None and self._holds_its_position(snapshot):
            self._tier.spill(self._entry(snapshot))
        self._drop_snapshot(snapshot)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self._tree.remove_snapshot(snapshot)
        self._slots.drop(snapshot.slot)
        if snapshot.partial is not None:
            self._blocks.drop(snapshot.partial)
        self._note_bare(snapshot.node)

    def _drop_node(self, node: Node) -> None:
        del self._bare[node]
        self._tree.remove_node(node)
        self._blocks.drop(node.block)
        assert node.parent is not None
        self._note_bare(node.parent)

    def _note_bare(self, node: Node) -> None:
        """What was behind it has gone, so it is the next to go."""
        if node.depth > 0 and node.is_bare:
            self._bare[node] = None
            self._bare.move_to_end(node, last=False)

    # --- the second tier

    def spill_all(self) -> None:
        """Everything that is kept goes to the second tier as well, the most recently used last: it counts as the youngest there."""
        for snapshot in sorted(self._tree.snapshots, key=lambda one: one.used_at) if self._tier is not None else ():
            if self._holds_its_position(snapshot):
                assert self._tier is not None
                self._tier.spill(self._entry(snapshot))

    def _entry(self, snapshot: Snapshot) -> TierEntry:
        path = snapshot.node.path()
        blocks = [node.block for node in path] + ([snapshot.partial] if snapshot.partial is not None else [])
        return TierEntry(
            salt=self._tree.salt(snapshot.node),
            tokens=(*snapshot.node.prefix(), *snapshot.tail),
            position=snapshot.position,
            blocks=tuple(blocks),
            slot=snapshot.slot,
        )

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
                self._keep_loaded(trail, tokens, [*held, *blocks], Claim(stored.position, slot, Why.PROMPT))
            self._blocks.give(blocks)
            self._slots.give([slot])
        self._blocks.give(held)

    def _keep_loaded(self, trail: Trail, tokens: Sequence[int], blocks: list[int], claim: Claim) -> None:
        self._tree.refresh(trail)
        self._publish_blocks(trail, tokens, blocks, claim.position)
        depth = claim.position // self._tree.block_tokens
        node, tail = trail.at(depth), tuple(tokens[depth * self._tree.block_tokens : claim.position])
        self._keep_state(trail, node, tail, claim, blocks[depth] if tail else None)

    # --- what is told

    def observe(self, observer: CacheObserver) -> None:
        self._observers.append(observer)

    def attach_tier(self, tier: SecondTier | None) -> None:
        self._tier = tier

    def stats(self) -> CacheStats:
        self._stats.blocks = self._tree.num_nodes
        self._stats.snapshots = len(self._tree.snapshots)
        self._stats.kv_bytes = self._blocks.num_kept * self._blocks.block_bytes
        self._stats.snapshot_bytes = len(self._tree.snapshots) * self._slots.slot_bytes
        return replace(self._stats)

    def check_integrity(self) -> tuple[list[int], list[int]]:
        """The kept blocks (once per hold) and slots. Raises AssertionError when the cache contradicts itself."""
        self._tree.check()
        bare = {node for node in self._tree.nodes() if node.is_bare}
        assert bare == self._bare.keys(), "bare leaves are miscounted"
        assert len(self._tree.snapshots) <= self._max_snapshots, "more snapshots than allowed"
        for node in self._tree.nodes():
            inner = node.parent is not None and node.parent.depth > 0
            if inner and not self._blocks.is_idle(node.block):
                assert node.parent is not None
                assert not self._blocks.is_idle(node.parent.block), "in use behind an idle block"
        if self._policies.enforce_tags:
            assert not any(map(self._is_lie, self._tree.snapshots)), "a snapshot holds another state"
        return self._kept_blocks(), [snapshot.slot for snapshot in self._tree.snapshots]

    def _kept_blocks(self) -> list[int]:
        partial = [snapshot.partial for snapshot in self._tree.snapshots if snapshot.partial is not None]
        return [node.block for node in self._tree.nodes()] + partial

    def _is_lie(self, snapshot: Snapshot) -> bool:
        return self._policies.enforce_tags and not self._holds_its_position(snapshot)

    def _holds_its_position(self, snapshot: Snapshot) -> bool:
        return self._slots.tags[snapshot.slot] == snapshot.position

    def _touch(self, snapshot: Snapshot) -> None:
        self._uses += 1
        snapshot.clock, snapshot.used_at = self._clock, self._uses


def _violation(purpose: str, who: Who, claimed: int, held: int | None) -> Violation:
    return Violation(purpose=purpose, request_id=who.key.request_id, step=who.step, claimed=claimed, held=held, story=who.story())
