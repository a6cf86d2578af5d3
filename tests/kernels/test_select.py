"""The choice of an implementation: explicit, with its reason, never silent."""

from __future__ import annotations

import pytest
import torch

from kernels import select


def test_reference_and_torch_can_be_asked_for() -> None:
    for choice in ("reference", "torch"):
        chosen = select(choice)
        assert chosen.name == chosen.ops.name
        assert chosen.name.startswith(choice)
        assert chosen.reason == "asked for"


def test_auto_says_why() -> None:
    chosen = select("auto")
    assert chosen.name != "reference"
    assert chosen.reason


def test_unknown_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="fastest"):
        select("fastest")  # type: ignore[arg-type]


def test_threads_are_set_and_checked() -> None:
    before = torch.get_num_threads()
    try:
        select("torch", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="threads"):
        select("torch", threads=0)
