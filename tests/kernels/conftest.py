"""The implementations under test, and the one tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
import torch
from torch import Tensor

from kernels.contract import Ops
from kernels.reference import ReferenceOps
from kernels.select import Choice, select

FAST: tuple[Choice, ...] = ("torch", "native")
TOLERANCE = 2e-5
"""Largest error, relative to the largest expected magnitude, of an fp32 op against the fp64 reference."""


class Near(Protocol):
    def __call__(self, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None: ...


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    """One torch thread unless a test asks for more: two of them on a busy machine wait for each other at every op."""
    torch.manual_seed(20261129)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FAST)
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each fast implementation that this machine has."""
    return _implementation(request.param)


@pytest.fixture(params=("reference", *FAST))
def any_ops(request: pytest.FixtureRequest) -> Ops:
    return _implementation(request.param)


@pytest.fixture
def reference() -> ReferenceOps:
    return ReferenceOps()


@pytest.fixture
def near() -> Near:
    def check(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
        assert actual.shape == expected.shape
        if not expected.numel():
            return
        error = float((actual.double() - expected.double()).abs().max())
        bound = tolerance * max(1e-3, float(expected.double().abs().max()))
        assert error <= bound, f"largest error {error:.3g}, allowed {bound:.3g}"

    return check


def _implementation(choice: Choice) -> Ops:
    try:
        return select(choice).ops
    except ValueError as error:
        pytest.skip(str(error))
