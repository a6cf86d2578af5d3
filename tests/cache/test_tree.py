"""The tree against a plain list of what was put in: finding, neighbours, and what is left after removals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_cache.leaders import PIECE, common_length
from engine.prefix_cache.nodes import Salt, Trail, Why
from engine.prefix_cache.tree import Tree

SALT = Salt("weights", None, "float32", None)
sequences = st.lists(st.integers(0, 1), max_size=14).map(tuple)


def grown(tree: Tree, tokens: Sequence[int], salt: Salt = SALT) -> Trail:
    """All full blocks of ``tokens`` are there afterwards."""
    trail, size = tree.trail(salt), tree.block_tokens
    tree.follow(trail, tokens, len(tokens))
    while (len(trail.nodes) + 1) * size <= len(tokens):
        tree.plant(trail)
        start = len(trail.nodes) * size
        trail.nodes.append(tree.add_node(trail.end, tuple(tokens[start : start + size]), block=0))
    return trail


def put(tree: Tree, tokens: Sequence[int], salt: Salt = SALT) -> None:
    trail = grown(tree, tokens, salt)
    tail = tuple(tokens[len(trail.nodes) * tree.block_tokens :])
    if tail not in trail.end.snapshots and tokens:
        tree.plant(trail)
        tree.add_snapshot(tree.propose(trail.end, tail, 1, 2 if tail else None, Why.PROMPT))


@given(put_in=st.lists(sequences, max_size=12), asked=sequences, limit=st.integers(0, 14), size=st.integers(1, 5), data=st.data())
def test_the_deepest_true_prefix_is_found(
    put_in: list[tuple[int, ...]], asked: tuple[int, ...], limit: int, size: int, data: st.DataObject
) -> None:
    tree, known = Tree(size), set[tuple[int, ...]]()
    limit = min(limit, len(asked))
    for tokens in put_in:
        put(tree, tokens)
        known |= {tokens} - {()}
        tree.check()
        remove: bool = data.draw(st.booleans())
        if known and remove:
            gone: tuple[int, ...] = data.draw(st.sampled_from(sorted(known)))
            known.remove(gone)
            tree.remove_snapshot(next(found for found in tree.snapshots if (*found.node.prefix(), *found.tail) == gone))
            tree.check()
    trail = tree.trail(SALT)
    tree.follow(trail, asked, limit)
    found = tree.deepest_snapshot(trail, asked, limit)
    best = max((len(tokens) for tokens in known if tokens == asked[: len(tokens)] and len(tokens) <= limit), default=0)
    assert (found.position if found is not None else 0) == best
    assert sorted((*each.node.prefix(), *each.tail) for each in tree.snapshots) == sorted(known)


def test_a_neighbour_inherits_what_the_one_before_it_saved() -> None:
    tree = Tree(4)
    for length in (4, 9, 12, 6):
        put(tree, tuple(range(length)))
    by_position = {snapshot.position: snapshot for snapshot in tree.snapshots}
    assert {position: snapshot.gain for position, snapshot in by_position.items()} == {4: 4, 6: 2, 9: 3, 12: 3}
    tree.remove_snapshot(by_position[6])
    tree.remove_snapshot(by_position[4])
    assert (by_position[9].gain, by_position[12].gain) == (9, 3)
    tree.check()


def test_salts_share_nothing_and_leave_nothing_behind() -> None:
    tree = Tree(2)
    other = SALT._replace(cache_salt="mine")
    put(tree, (1, 2, 3), other)
    trail = tree.trail(SALT)
    tree.follow(trail, (1, 2, 3), 3)
    assert not trail.nodes
    (snapshot,) = tree.snapshots
    assert tree.salt(snapshot.node) == other
    tree.remove_snapshot(snapshot)
    (node,) = tree.nodes()
    tree.remove_node(node)
    assert not tree.roots
    tree.check()


def test_a_trail_survives_its_root() -> None:
    """Two requests look at an empty tree; the first one's prefix comes and goes before the second one leaves its own."""
    tree = Tree(2)
    late = tree.trail(SALT)
    put(tree, (5,))
    (snapshot,) = tree.snapshots
    tree.follow(late, (5, 6), 2)
    assert tree.deepest_snapshot(late, (5, 6), 2) is snapshot
    tree.remove_snapshot(snapshot)
    assert not late.root.alive
    tree.plant(late)
    assert tree.roots == {SALT: late.root}
    again = tree.trail(SALT)
    tree.add_node(late.end, (5, 6), 3)
    tree.follow(again, (5, 6), 2)
    assert len(again.nodes) == 1
    tree.check()


@given(one=sequences, other=sequences, before=st.sampled_from([0, PIECE - 3, 2 * PIECE]))
def test_common_length(one: tuple[int, ...], other: tuple[int, ...], before: int) -> None:
    one, other = (0,) * before + one, (0,) * before + other
    length = common_length([*one], [*other])
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_a_node_with_something_behind_it_stays() -> None:
    tree = Tree(2)
    put(tree, (1, 2, 3))
    (node,) = tree.nodes()
    with pytest.raises(AssertionError, match="something is behind it"):
        tree.remove_node(node)
