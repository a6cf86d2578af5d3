"""What looking up costs: many wait, and every step asks what the cache has for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.prefix_cache.nodes import Trail
from engine.prefix_cache.tree import Tree
from engine.request import EngineRequest
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams
from tests.reproductions.model_free import ModelFreeCore

WAITING = 5


def request(name: str, token: int, num_prompt: int) -> EngineRequest:
    key = RequestKey(RequestId(name), 0)
    return EngineRequest(key=key, token_ids=(token,) * num_prompt, sampling=SamplingParams(max_tokens=60, ignore_eos=True))


def test_who_waits_is_looked_up_again_only_when_the_tree_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    follow = Tree.follow

    def counted(tree: Tree, trail: Trail, tokens: Sequence[int], limit: int) -> None:
        looks.append(limit)
        follow(tree, trail, tokens, limit)

    monkeypatch.setattr(Tree, "follow", counted)
    core = ModelFreeCore(max_running=8, kv_blocks=30)
    core.submit(request("runs", 0, 300))
    while core.load().waiting_tokens > 0:
        core.step()
    looks.clear()
    for number in range(WAITING):
        core.submit(request(f"waits {number}", 1 + number, 200))
    for _ in range(10):  # only one decodes: nothing is kept, nothing goes
        core.step()
    assert core.load().waiting == WAITING, "there are rows for them, but no blocks"
    assert len(looks) == WAITING
    core.flush_cache()
    core.step()
    assert len(looks) == 2 * WAITING
    core.check_integrity()
