"""The pages that the tree keeps, and which of them go first.

A block goes with its node, a slot and a partly filled block with their snapshot. The first blocks of every request that publishes
are the tree's, so behind a node that is idle everything is: idle pages can always be given up from the leaves on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.nodes import Node, Snapshot, Tokens, Trail
from engine.prefix_cache.publishing import Claim
from engine.prefix_cache.stats import CacheStats
from engine.prefix_cache.tree import Tree


class Kept:
    def __init__(
        self, pools: Pools, max_snapshots: int, policies: Policies, stats: CacheStats, evicted: Callable[[Snapshot], None]
    ) -> None:
        """``evicted`` is called before a snapshot goes: its pages can still be read. Nothing is said of what a flush drops."""
        self._blocks, self._slots = pools.blocks, pools.slots
        self.max_snapshots = max_snapshots
        self._policies = policies
        self._stats = stats
        self._evicted = evicted
        self.tree = Tree(pools.blocks.block_tokens)
        self._bare: OrderedDict[Node, None] = OrderedDict()
        """Leaves without a snapshot, the least recently used first."""
        self._clock = 0.0
        self._uses = 0
        pools.blocks.reclaim = self._free_blocks
        pools.slots.reclaim = self._free_slots

    # --- keeping

    def keep_blocks(self, trail: Trail, tokens: Sequence[int], blocks: list[int], known: int) -> None:
        """The full blocks of [0, known). A block that the tree has for the same tokens takes the place of the one in ``blocks``."""
        size = self.tree.block_tokens
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

    def _add_node(self, trail: Trail, tokens: Tokens, block: int) -> Node:
        self.tree.plant(trail)
        parent = trail.end
        node = self.tree.add_node(parent, tokens, block)
        self._blocks.keep(block)
        self._bare.pop(parent, None)
        self._bare[node] = None
        self._stats.published_blocks += 1
        return node

    def keep_state(self, trail: Trail, tokens: Sequence[int], blocks: Sequence[int], claim: Claim) -> bool:
        """A copy of the claimed state, whatever the slot's tag. False: it is there already, or all that are there are worth more."""
        size = self.tree.block_tokens
        depth = claim.position // size
        node, tail = trail.at(depth), tuple(tokens[depth * size : claim.position])
        there = node.snapshots.get(tail)
        if there is not None:
            self.touch(there)
            return False
        new = self.tree.propose(node, tail, claim.slot, blocks[depth] if tail else None, claim.why)
        new.clock, new.used_at = self._clock, self._uses
        if not self._make_room(new):
            self._stats.unworthy_snapshots += 1
            return False
        (new.slot,) = self._slots.take(1)
        self._slots.copy(claim.slot, new.slot)
        self._slots.keep(new.slot)
        self._slots.give([new.slot])
        self._add_snapshot(trail, new)
        return True

    def _add_snapshot(self, trail: Trail, new: Snapshot) -> None:
        if not new.node.alive:  # the root went with the last snapshot that had to make room
            self.tree.plant(trail)
            new.node = trail.root
        self.tree.add_snapshot(new)
        if new.partial is not None:
            self._blocks.keep(new.partial)
        self._bare.pop(new.node, None)
        self._stats.published_snapshots += 1
        self.touch(new)

    def _make_room(self, new: Snapshot) -> bool:
        """A slot for one more snapshot, unless all that are there are worth more."""
        full = len(self.tree.snapshots) >= self.max_snapshots
        if not full and self._slots.num_free > 0:
            return True
        victim = self._least_valuable()
        if victim is None or self.max_snapshots == 0:
            return False
        score = self._policies.score
        if score(victim) > score(new):
            return False
        self._evict_least(victim)
        return self._slots.num_free > 0

    # --- being used

    def touch(self, snapshot: Snapshot) -> None:
        self._uses += 1
        snapshot.clock, snapshot.used_at = self._clock, self._uses

    def touch_end(self, nodes: Sequence[Node]) -> None:
        for node in nodes[-1:]:
            if node in self._bare:
                self._bare.move_to_end(node)

    def holds_its_position(self, snapshot: Snapshot) -> bool:
        return self._slots.tags[snapshot.slot] == snapshot.position

    # --- giving up

    def evict_snapshot(self, snapshot: Snapshot) -> None:
        self._stats.evicted_snapshots += 1
        self._evicted(snapshot)
        self._drop_snapshot(snapshot)

    def flush(self) -> int:
        """Forget everything; returns how many blocks and snapshots that were. Pages in use come back when their users are done."""
        dropped = self.tree.num_nodes + len(self.tree.snapshots)
        for snapshot in list(self.tree.snapshots):
            self._drop_snapshot(snapshot)
        while self._bare:
            self._drop_node(next(iter(self._bare)))
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
            ends = filter(self._holds_blocks, self.tree.snapshots)
            self.evict_snapshot(min(ends, key=lambda snapshot: snapshot.used_at))

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
        idle = (snapshot for snapshot in self.tree.snapshots if self._slots.is_idle(snapshot.slot))
        return min(idle, key=self._policies.score, default=None)

    def _evict_least(self, snapshot: Snapshot) -> None:
        """What is kept or used from now on starts where this one ends."""
        self._clock = max(self._clock, self._policies.score(snapshot))
        self.evict_snapshot(snapshot)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self.tree.remove_snapshot(snapshot)
        self._slots.drop(snapshot.slot)
        if snapshot.partial is not None:
            self._blocks.drop(snapshot.partial)
        self._note_bare(snapshot.node)

    def _drop_node(self, node: Node) -> None:
        del self._bare[node]
        self.tree.remove_node(node)
        self._blocks.drop(node.block)
        assert node.parent is not None
        self._note_bare(node.parent)

    def _note_bare(self, node: Node) -> None:
        """What was behind it has gone, so it is the next to go."""
        if node.depth > 0 and node.is_bare:
            self._bare[node] = None
            self._bare.move_to_end(node, last=False)

    # --- looking at the whole

    def check_integrity(self) -> tuple[list[int], list[int]]:
        """The kept blocks (once per hold) and slots. Raises AssertionError when what is kept contradicts itself."""
        self.tree.check()
        snapshots = self.tree.snapshots
        bare = {node for node in self.tree.nodes() if node.is_bare}
        assert bare == self._bare.keys(), "bare leaves are miscounted"
        assert len(snapshots) <= self.max_snapshots, "more snapshots than allowed"
        for node in self.tree.nodes():
            if node.parent is not None and node.parent.depth > 0 and not self._blocks.is_idle(node.block):
                assert not self._blocks.is_idle(node.parent.block), "in use behind an idle block"
        if self._policies.enforce_tags:
            assert all(map(self.holds_its_position, snapshots)), "a snapshot holds another state"
        partial = [snapshot.partial for snapshot in snapshots if snapshot.partial is not None]
        return [node.block for node in self.tree.nodes()] + partial, [snapshot.slot for snapshot in snapshots]
