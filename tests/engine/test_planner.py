"""Pure decisions: chunk ends, shares of the budget, padding of a tail."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ChunkPolicy
from engine.planner import Candidate, ChunkRule, pads_tail, plan_chunk, share_budget

sizes = st.integers(1, 64)


def rule(policy: ChunkPolicy = "soft", *, grid: int = 4, max_chunk: int = 64, tail_tokens: int = 1, backoff_tokens: int = 0) -> ChunkRule:
    return ChunkRule(policy=policy, grid=grid, max_chunk=max_chunk, tail_tokens=tail_tokens, backoff_tokens=backoff_tokens)


@st.composite
def rules(draw: st.DrawFn) -> ChunkRule:
    policy: ChunkPolicy = draw(st.sampled_from(["soft", "strict"]))
    grid = draw(sizes)
    max_chunk = draw(st.integers(grid if policy == "strict" else 1, 128))
    backoff = draw(st.sampled_from([0, 0, 1, grid]))
    return rule(policy, grid=grid, max_chunk=max_chunk, tail_tokens=draw(st.integers(1, 8)), backoff_tokens=backoff)


branch_points = st.lists(st.integers(0, 600), max_size=4)


@given(rule=rules(), start=st.integers(0, 300), rest=st.integers(1, 300), budget=st.integers(0, 200), branches=branch_points)
def test_a_chunk_is_never_too_long_and_passes_no_stop(rule: ChunkRule, start: int, rest: int, budget: int, branches: list[int]) -> None:
    target = start + rest
    end = start + plan_chunk(rule, start=start, target=target, budget=budget, branches=branches)
    assert start <= end <= start + min(rest, budget, rule.max_chunk)
    assert not any(start < branch < end for branch in branches)
    lines = [line for line in range(0, end, rule.grid) if line > start]
    if start % rule.grid > 0 and rule.policy == "strict":
        assert not lines, "an off-grid start stops at the next line"
    if start < end < target and end % rule.grid > 0 and end not in branches:
        stop = target // rule.grid * rule.grid - rule.backoff_tokens
        assert (rule.backoff_tokens > 0 and end == stop) or (rule.policy == "soft" and not lines), "on the grid, wherever it can be"


@given(rule=rules(), start=st.integers(0, 300), rest=st.integers(1, 300), branches=branch_points, seed=st.integers(0, 2**32))
def test_every_prefill_gets_to_its_end(rule: ChunkRule, start: int, rest: int, branches: list[int], seed: int) -> None:
    """There is a budget at which the next chunk is more than nothing: strict's is what reaches the grid from anywhere, soft's is one."""
    enough = min(rule.max_chunk, rule.grid) if rule.policy == "strict" else 1
    position, target, draw = start, start + rest, random.Random(seed)
    for _ in range(rest + 1):
        if position == target:
            break
        chunk = plan_chunk(rule, start=position, target=target, budget=draw.randint(enough, 200), branches=branches)
        assert chunk > 0
        position += chunk
    assert position == target
    assert plan_chunk(rule, start=target, target=target, budget=rule.tail_tokens) == rule.tail_tokens
    assert plan_chunk(rule, start=target, target=target, budget=rule.tail_tokens - 1) == 0


def test_strict_defers_what_soft_runs() -> None:
    for policy, count in (("strict", 0), ("soft", 100)):
        assert plan_chunk(rule(policy, grid=256, max_chunk=256), start=0, target=2002, budget=100) == count  # type: ignore[arg-type]
        assert plan_chunk(rule(policy, grid=256, max_chunk=256), start=1780, target=2002, budget=222) == (12 if count == 0 else 222)  # type: ignore[arg-type]


def test_the_first_seeds_rule_can_be_run() -> None:
    """B = 1600, the last cacheable position backed off by a block and still a mandatory stop."""
    backed_off = rule(grid=1600, max_chunk=8192, backoff_tokens=1600)
    assert plan_chunk(backed_off, start=0, target=5000, budget=8192) == 3200
    assert plan_chunk(backed_off, start=3200, target=5000, budget=8192) == 1800
    assert plan_chunk(rule(grid=1600, max_chunk=8192), start=0, target=5000, budget=8192) == 5000


def candidates() -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        lambda last, computed, rest: (last, computed, computed + rest), st.integers(-1, 5), st.integers(0, 40), st.integers(0, 40)
    )
    return st.lists(one, max_size=8).map(
        lambda items: [
            Candidate(last_step=last, arrival=i, computed=computed, prefill_end=end) for i, (last, computed, end) in enumerate(items)
        ]
    )


@given(data=st.data(), width=st.integers(1, 8), extra=st.integers(0, 40), max_chunk=sizes)
def test_shares_keep_the_budget_and_serve_the_one_that_waited_longest(data: st.DataObject, width: int, extra: int, max_chunk: int) -> None:
    asking = data.draw(candidates())
    prefill_tokens = data.draw(st.none() | st.integers(1, 60))
    shares = share_budget(asking, rule(max_chunk=max_chunk, tail_tokens=width), step_tokens=width + extra, prefill_tokens=prefill_tokens)
    assert sum(shares) <= width + extra
    assert all(share in (0, width) for one, share in zip(asking, shares, strict=True) if not one.is_prefill)
    if prefill_tokens is not None and not all(one.is_prefill for one in asking):
        assert sum(share for one, share in zip(asking, shares, strict=True) if one.is_prefill) <= prefill_tokens
    oldest = min((one.last_step for one in asking), default=0)
    assert not asking or any(share > 0 for one, share in zip(asking, shares, strict=True) if one.last_step == oldest)


def test_a_long_prompt_and_steady_decodes_both_go_on_when_the_budget_is_one_window() -> None:
    """Of R requests each is served at least once in R steps."""
    served_at = [0, 0, 0]
    for step in range(1, 40):
        asking = [Candidate(last_step=last, arrival=i, computed=9, prefill_end=900 if i == 2 else 9) for i, last in enumerate(served_at)]
        for i, share in enumerate(share_budget(asking, rule(tail_tokens=4), step_tokens=4)):
            assert share > 0 or step - served_at[i] < len(served_at)
            served_at[i] = step if share > 0 else served_at[i]


@pytest.mark.parametrize(
    ("padding", "beside", "padded"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("always", False, True),
        ("always", True, True),
        ("never", True, False),
    ],
)
def test_a_tail_is_padded_as_the_setting_says(padding: str, beside: bool, padded: bool) -> None:
    assert pads_tail(padding, beside_speculation=beside) is padded  # type: ignore[arg-type]
