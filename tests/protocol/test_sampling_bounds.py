"""Whatever the sampling parameters allow can be sent: no number is too large for the wire."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.codec import encode
from protocol.sampling import SamplingParams

HUGE = 10**30
FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", HUGE),
    ("min_tokens", HUGE),
    ("top_k", HUGE),
    ("seed", HUGE),
    ("logprobs", HUGE),
    ("stop_token_ids", (HUGE,)),
    ("stop_token_ids", (-1,)),
    ("logit_bias", {HUGE: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("repetition_penalty", 1e-320),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_what_cant_be_sent_or_computed_with_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        SamplingParams.model_validate({"max_tokens": 2**31 - 1, field: value})


def test_the_largest_values_can_be_sent() -> None:
    top = 2**31 - 1
    assert encode(
        SamplingParams(
            max_tokens=top, min_tokens=top, top_k=top, seed=2**63 - 1, stop_token_ids=(top,), logit_bias={top: 100.0}, logprobs=20
        )
    )
