"""What the tree is made of, a request's way through it, and what the request finds there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

Tokens = tuple[int, ...]


class Salt(NamedTuple):
    """All that decides what a token's KV and state are, but the tokens: prefixes are shared within one salt only."""

    weights_digest: str
    adapter: str | None
    dtype: str
    cache_salt: str | None
    """The caller's own: who must not find each other's prompts uses different ones."""


class Why(Enum):
    """Why there is a snapshot at its position."""

    GRID = "grid"
    PROMPT = "prompt"
    """The end of a prefill: N-1."""
    BRANCH = "branch"
    """Requests have been seen to part here."""
    OUTPUT = "output"
    """The end of an answer: the next turn goes on here."""
    LANDED = "landed"
    """Came from a peer, at N-1."""


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """h(position) with its hidden tail, in a slot that nobody writes any more."""

    node: Node
    tail: Tokens
    """The tokens behind the node's block, fewer than a block."""
    position: int
    slot: int
    partial: int | None
    """The block of the tail's KV; positions behind the tail may be anything. None without a tail."""
    why: Why
    shallower: Snapshot | None = None
    """The nearest one on the way to the root: what a request falls back to when this one is gone."""
    deeper: set[Snapshot] = field(default_factory=set)
    hits: int = 0
    clock: float = 0.0
    """Of the eviction rule, when the snapshot was last useful."""
    used_at: int = 0
    """Number of the cache's use that touched it last."""

    @property
    def gain(self) -> int:
        """Tokens that a hit here saves beyond those that the next shallower snapshot would save."""
        return self.position - (self.shallower.position if self.shallower is not None else 0)


@dataclass(slots=True, eq=False)
class Node:
    """One full block behind its parent's. The root is no block: depth 0."""

    parent: Node | None
    tokens: Tokens
    block: int
    depth: int
    """Blocks from the root to here, this one included."""
    alive: bool = True
    children: dict[Tokens, Node] = field(default_factory=dict)
    snapshots: dict[Tokens, Snapshot] = field(default_factory=dict)
    """By tail."""

    @property
    def is_bare(self) -> bool:
        """Nothing is behind it: it can go."""
        return not self.children and not self.snapshots

    def up(self) -> Iterator[Node]:
        """This node, its parent and so on, the root included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def path(self) -> list[Node]:
        """From the first block to this node; empty for the root."""
        return [node for node in self.up() if node.depth > 0][::-1]

    def prefix(self) -> list[int]:
        """The tokens from the root to the end of this block."""
        return [token for node in self.path() for token in node.tokens]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request goes on from: KV of the nodes, and a state."""

    nodes: tuple[Node, ...] = ()
    snapshot: Snapshot | None = None
    kv_tokens: int = 0
    """The end of the last node."""

    @property
    def state_tokens(self) -> int:
        return self.snapshot.position if self.snapshot is not None else 0

    def without_state(self) -> Hit:
        return replace(self, snapshot=None)

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.nodes]

    @property
    def partial(self) -> int | None:
        """The snapshot's partly filled block. As long as the state is wanted it can't go, whether a node covers it or not."""
        return self.snapshot.partial if self.snapshot is not None else None

    @property
    def covering(self) -> Node | None:
        """The node of that block's tokens: what a request goes on with in its place. It may be the same block."""
        return self.nodes[self.snapshot.node.depth] if self.snapshot is not None and self.state_tokens < self.kv_tokens else None


NO_HIT = Hit()


class Trail:
    """A request's way through the tree: the nodes whose tokens are the request's own, from the root on."""

    def __init__(self, salt: Salt, root: Node) -> None:
        self.salt = salt
        self.root = root
        self.nodes: list[Node] = []
        self.hit = NO_HIT
        """What the last look found."""
        self.looked: tuple[int, int] | None = None
        """Of that look: ``Tree.changes``, and how many tokens it was for."""
        self.flushes = 0
        """How often the cache had been flushed when the request began to use these nodes."""

    @property
    def end(self) -> Node:
        return self.at(len(self.nodes))

    def at(self, depth: int) -> Node:
        return self.nodes[depth - 1] if depth > 0 else self.root
