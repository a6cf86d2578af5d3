"""The tree over token blocks. A node is one full block of KV; snapshots hang at exact positions, at or within the block behind a node.

    root ── [0,16) ── [16,32) ── [32,48)
                         │  ├─ snapshot 32      tail ()
                         │  └─ snapshot 39      tail (t32..t38), with its own hold on the partly filled block behind
                         └─── [32,48)'          where requests part

Children and tails are found by their tokens themselves, so nothing can collide. Page numbers and positions only: whoever
uses the tree (``kept.py``) keeps the pages alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.prefix_cache.nodes import Node, Salt, Snapshot, Tokens, Trail, Why


class Tree:
    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.roots: dict[Salt, Node] = {}
        """Those with something behind them: callers' salts are many."""
        self._salts: dict[Node, Salt] = {}
        self.num_nodes = 0
        self.snapshots: dict[Snapshot, None] = {}
        """All of them, in order of age."""
        self.changes = 0
        """How often anything came or went: what was found is true as long as this stays."""

    # --- finding

    def trail(self, salt: Salt) -> Trail:
        return Trail(salt, self.roots.get(salt) or Node(None, (), 0, 0, alive=False))

    def salt(self, node: Node) -> Salt:
        *_, root = node.up()
        return self._salts[root]

    def follow(self, trail: Trail, tokens: Sequence[int], limit: int) -> None:
        """Bring the trail up to what the tree holds now: forget nodes that are gone, go on to the last full block in [0, limit)."""
        while trail.nodes and not trail.nodes[-1].alive:  # nodes go from the leaves on
            trail.nodes.pop()
        self.refresh(trail)
        size = self.block_tokens
        del trail.nodes[limit // size :]
        while (len(trail.nodes) + 1) * size <= limit:
            start = len(trail.nodes) * size
            node = trail.end.children.get(tuple(tokens[start : start + size]))
            if node is None:
                return
            trail.nodes.append(node)

    def refresh(self, trail: Trail) -> None:
        """A root goes with the last thing behind it; there may be a new one."""
        if not trail.root.alive:
            trail.root = self.roots.get(trail.salt, trail.root)

    def deepest_snapshot(self, trail: Trail, tokens: Sequence[int], limit: int) -> Snapshot | None:
        """The last one at or before ``limit`` whose tokens are the first of ``tokens``. The trail has just been followed."""
        for node in (*reversed(trail.nodes), trail.root):
            if not node.snapshots:
                continue
            start = node.depth * self.block_tokens
            for length in range(min(self.block_tokens - 1, limit - start), -1, -1):
                found = node.snapshots.get(tuple(tokens[start : start + length]))
                if found is not None:
                    return found
        return None

    # --- growing

    def plant(self, trail: Trail) -> None:
        """Something is to be added behind the trail's end: its root is known from now on."""
        if not trail.root.alive:
            assert not trail.nodes, "nodes behind a root that is gone"
            trail.root = self.roots.setdefault(trail.salt, trail.root)
            trail.root.alive = True
            self._salts[trail.root] = trail.salt

    def add_node(self, parent: Node, tokens: Tokens, block: int) -> Node:
        assert parent.alive, "behind a node that is gone"
        assert len(tokens) == self.block_tokens, "a node is a full block"
        assert tokens not in parent.children, "this block is there already"
        node = parent.children[tokens] = Node(parent, tokens, block, parent.depth + 1)
        self.num_nodes += 1
        self.changes += 1
        return node

    def propose(self, node: Node, tail: Tokens, slot: int, partial: int | None, why: Why) -> Snapshot:
        """A snapshot as it would be; ``add_snapshot`` puts it there."""
        assert len(tail) < self.block_tokens, "a tail is less than a block"
        position = node.depth * self.block_tokens + len(tail)
        snapshot = Snapshot(node=node, tail=tail, position=position, slot=slot, partial=partial, why=why)
        snapshot.shallower = self._shallower(snapshot)
        return snapshot

    def add_snapshot(self, snapshot: Snapshot) -> None:
        node, tail = snapshot.node, snapshot.tail
        assert node.alive, "at a node that is gone"
        assert tail not in node.snapshots, "this position is taken already"
        self._link(snapshot)
        node.snapshots[tail] = snapshot
        self.snapshots[snapshot] = None
        self.changes += 1

    # --- shrinking

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Its deeper neighbours fall back to its shallower one."""
        del snapshot.node.snapshots[snapshot.tail]
        del self.snapshots[snapshot]
        self.changes += 1
        for deeper in snapshot.deeper:
            deeper.shallower = snapshot.shallower
        if snapshot.shallower is not None:
            snapshot.shallower.deeper.discard(snapshot)
            snapshot.shallower.deeper |= snapshot.deeper
        self._forget_root(snapshot.node)

    def remove_node(self, node: Node) -> None:
        """Precondition: nothing is behind it."""
        assert node.is_bare, "something is behind it"
        assert node.parent is not None, "the root stays as long as something is behind it"
        node.alive = False
        del node.parent.children[node.tokens]
        self.num_nodes -= 1
        self.changes += 1
        self._forget_root(node.parent)

    # --- looking at the whole

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def check(self) -> None:
        """Raises AssertionError when links, depths or positions don't fit together."""
        found: set[Snapshot] = set()
        for root in self.roots.values():
            assert root.alive, "a dead root is known"
            assert root.depth == 0, "a root is no block"
        for node in (*self.roots.values(), *self.nodes()):
            assert node.alive, "a dead node is linked"
            for tokens, child in node.children.items():
                assert (child.parent, child.tokens, child.depth) == (node, tokens, node.depth + 1), "a child doesn't know its place"
            for tail, snapshot in node.snapshots.items():
                found.add(snapshot)
                assert (snapshot.node, snapshot.tail) == (node, tail), "a snapshot doesn't know its place"
                assert snapshot.position == node.depth * self.block_tokens + len(tail), "a snapshot is elsewhere"
                assert (snapshot.partial is None) == (not tail), "a tail has its block"
                assert snapshot.shallower is self._shallower(snapshot), f"the neighbour of {snapshot.position} is another"
                assert snapshot.shallower is None or snapshot in snapshot.shallower.deeper, "neighbours disagree"
        assert found == set(self.snapshots), "a snapshot is lost"
        assert self.num_nodes == sum(1 for _ in self.nodes()), "nodes are miscounted"

    # --- links

    def _forget_root(self, node: Node) -> None:
        if node.parent is None and node.is_bare:
            node.alive = False
            del self.roots[self._salts.pop(node)]

    def _link(self, snapshot: Snapshot) -> None:
        """Put it between its shallower neighbour and those that fell back to that one through here."""
        snapshot.shallower = above = self._shallower(snapshot)
        node = snapshot.node
        if node.children or any(len(tail) > len(snapshot.tail) for tail in node.snapshots):
            others = above.deeper if above is not None else {other for other in self.snapshots if other.shallower is None}
            snapshot.deeper = {other for other in others if self._is_before(snapshot, other)}
        for deeper in snapshot.deeper:
            deeper.shallower = snapshot
        if above is not None:
            above.deeper = (above.deeper - snapshot.deeper) | {snapshot}

    def _shallower(self, snapshot: Snapshot) -> Snapshot | None:
        tail, below = snapshot.tail, len(snapshot.tail) - 1
        for node in snapshot.node.up():
            for length in range(below, -1, -1) if node.snapshots else ():
                found = node.snapshots.get(tail[:length])
                if found is not None:
                    return found
            tail, below = node.tokens, self.block_tokens - 1
        return None

    def _is_before(self, snapshot: Snapshot, other: Snapshot) -> bool:
        """Whether ``snapshot`` lies on the way from the root to ``other``."""
        if other.position <= snapshot.position:
            return False
        depth, tail = snapshot.node.depth, snapshot.tail
        behind = other.tail
        for node in other.node.up():
            if node.depth == depth:
                return node is snapshot.node and behind[: len(tail)] == tail
            behind = node.tokens
        return False
