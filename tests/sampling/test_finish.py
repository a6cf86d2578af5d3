"""Where a sequence ends, and that a window ends where single steps would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.finish import FinishDecision, cut_at_finish, finish_reason
from protocol.sampling import SamplingParams

EOS = (2, 3)


def stop(token: int) -> FinishDecision:
    return FinishDecision(reason="stop", stop_token_id=token)


LENGTH = FinishDecision(reason="length")


@pytest.mark.parametrize(
    ("settings_", "output", "expected"),
    [
        ({}, [], None),
        ({}, [7], None),
        ({}, [7, 2], stop(2)),
        ({}, [3], stop(3)),
        ({}, [2, 7], None),  # only the last token is looked at
        ({"ignore_eos": True}, [2], None),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, [2], stop(2)),
        ({"stop_token_ids": (7,)}, [7], stop(7)),
        ({"max_tokens": 2}, [7, 7], LENGTH),
        ({"max_tokens": 2}, [7, 2], stop(2)),  # a stop at the limit is a stop
        ({"max_tokens": 1}, [2], stop(2)),
        ({"max_tokens": 1}, [9], LENGTH),
        ({"min_tokens": 2}, [7, 2], None),
        ({"min_tokens": 2}, [7, 7, 2], stop(2)),
    ],
)
def test_finish_reason(settings_: dict[str, object], output: list[int], expected: FinishDecision | None) -> None:
    assert finish_reason(SamplingParams.model_validate(settings_), EOS, output) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_window_ends_where_single_steps_would(
    before: list[int], window: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool
) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), ignore_eos=ignore_eos, stop_token_ids=(5,))
    expected: list[int] = []
    decision = None
    for token in window:
        expected.append(token)
        decision = finish_reason(params, EOS, [*before, *expected])
        if decision is not None:
            break
    assert cut_at_finish(params, EOS, before, window) == (expected, decision)
