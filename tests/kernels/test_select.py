"""The choice of an implementation: explicit, with its reason, never silent."""

from __future__ import annotations

import pytest
import torch

from kernels import select
from kernels.cpu_ops.native_ops import NativeUnavailable


def test_reference_and_torch_can_be_asked_for() -> None:
    for choice in ("reference", "torch"):
        chosen = select(choice)
        assert chosen.name == chosen.ops.name
        assert chosen.name.startswith(choice)
        assert chosen.reason == "asked for"


def test_auto_is_native_where_it_can_be() -> None:
    chosen = select("auto")
    if chosen.name.startswith("native"):
        assert select("native").name == chosen.name
        assert "self-check" in chosen.reason
        assert torch.get_num_threads() == 1
    else:
        assert chosen.name == "torch-onednn"
        with pytest.raises(ValueError, match="cannot be used here"):
            select("native")


def test_auto_falls_back_to_torch_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(threads: int | None) -> None:
        raise NativeUnavailable("no such luck")

    monkeypatch.setattr("kernels.cpu_ops.native_ops.load", refuse)
    chosen = select("auto")
    assert (chosen.name, chosen.reason) == ("torch-onednn", "no such luck")
    with pytest.raises(ValueError, match="no such luck"):
        select("native")


def test_unknown_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="fastest"):
        select("fastest")  # type: ignore[arg-type]


def test_threads_are_set_and_checked() -> None:
    for threads in (1, 2):
        select("torch", threads=threads)
        assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="threads"):
        select("torch", threads=0)
