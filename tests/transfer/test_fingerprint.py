"""Two processes that differ in anything are told in what."""

from __future__ import annotations

import pytest

from protocol.messages import Fingerprint
from transfer.fingerprint import first_difference

OURS = Fingerprint(
    model_type="nemotron_h",
    config_digest="c",
    weights_digest="w",
    dtype="float32",
    state_dtype="float32",
    block_tokens=16,
    block_bytes=1024,
    slot_bytes=4096,
    layout_digest="l",
    mtp=True,
)


def test_the_same_is_the_same() -> None:
    assert first_difference(OURS, OURS.model_copy()) is None


@pytest.mark.parametrize("field", list(Fingerprint.model_fields))
def test_each_field_is_compared_and_named(field: str) -> None:
    theirs = getattr(OURS, field)
    other = not theirs if isinstance(theirs, bool) else theirs * 2
    mismatch = first_difference(OURS, OURS.model_copy(update={field: other}))
    assert mismatch is not None
    assert mismatch.field == field
    assert str(mismatch) == f"{field} differs: ours {theirs!r}, theirs {other!r}"


def test_the_first_of_several_is_named() -> None:
    mismatch = first_difference(OURS, OURS.model_copy(update={"weights_digest": "x", "mtp": False}))
    assert mismatch is not None
    assert mismatch.field == "weights_digest"
