"""Pure decisions: chunk ends, shares of the budget, padding of a tail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner import Candidate, pads_tail, plan_chunk, share_budget

sizes = st.integers(1, 64)


@given(start=st.integers(0, 500), rest=st.integers(0, 500), budget=st.integers(0, 300), max_chunk=sizes, grid=sizes)
def test_a_chunk_is_positive_whenever_it_can_be_and_never_too_long(start: int, rest: int, budget: int, max_chunk: int, grid: int) -> None:
    count = plan_chunk(start=start, target=start + rest, budget=budget, max_chunk=max_chunk, grid=grid)
    assert (count > 0) == (rest > 0 and budget > 0)
    assert count <= min(rest, budget, max_chunk)


@given(start=st.integers(0, 500), rest=st.integers(1, 500), budget=st.integers(1, 300), max_chunk=sizes, grid=sizes)
def test_a_chunk_ends_on_the_grid_when_it_reaches_it_or_at_the_prompts_end(
    start: int, rest: int, budget: int, max_chunk: int, grid: int
) -> None:
    count = plan_chunk(start=start, target=start + rest, budget=budget, max_chunk=max_chunk, grid=grid)
    reach = start + min(rest, budget, max_chunk)
    if reach // grid * grid > start and reach < start + rest:
        assert (start + count) % grid == 0
    else:
        assert start + count == reach


@given(target=st.integers(1, 300), budget=sizes, max_chunk=sizes, grid=sizes, start=st.integers(0, 40))
def test_chunks_cover_the_prompt_from_any_start(target: int, budget: int, max_chunk: int, grid: int, start: int) -> None:
    position = min(start, target)
    for _ in range(target + 1):
        if position == target:
            break
        position += plan_chunk(start=position, target=target, budget=budget, max_chunk=max_chunk, grid=grid)
    assert position == target


def candidates(width: int) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        lambda last, computed, rest: (last, computed, computed + rest), st.integers(-1, 5), st.integers(0, 40), st.integers(0, 40)
    )
    return st.lists(one, max_size=8).map(
        lambda items: [
            Candidate(last_step=last, arrival=i, computed=computed, prefill_end=end, decode_tokens=width)
            for i, (last, computed, end) in enumerate(items)
        ]
    )


@given(data=st.data(), width=st.integers(1, 8), extra=st.integers(0, 40), max_chunk=sizes)
def test_shares_keep_the_budget_and_serve_the_one_that_waited_longest(data: st.DataObject, width: int, extra: int, max_chunk: int) -> None:
    asking = data.draw(candidates(width))
    shares = share_budget(asking, step_tokens=width + extra, max_chunk=max_chunk, grid=4)
    assert sum(shares) <= width + extra
    assert all(share in (0, width) for one, share in zip(asking, shares, strict=True) if not one.is_prefill)
    oldest = min((one.last_step for one in asking), default=0)
    assert not asking or any(share > 0 for one, share in zip(asking, shares, strict=True) if one.last_step == oldest)


def test_a_long_prompt_and_steady_decodes_both_go_on_when_the_budget_is_one_window() -> None:
    """Of R requests each is served at least once in R steps."""
    served_at = [0, 0, 0]
    for step in range(1, 40):
        asking = [
            Candidate(last_step=last, arrival=i, computed=9, prefill_end=900 if i == 2 else 9, decode_tokens=4)
            for i, last in enumerate(served_at)
        ]
        for i, share in enumerate(share_budget(asking, step_tokens=4, max_chunk=64, grid=4)):
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
