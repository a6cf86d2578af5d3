"""One tiny checkpoint and one loaded model for all tests of the engine core."""

from __future__ import annotations

import pytest
import torch

from tests.engine.engine_kit import MakeCore, write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_core(tmp_path_factory: pytest.TempPathFactory) -> MakeCore:
    return MakeCore(write_checkpoint(tmp_path_factory.mktemp("tiny") / "model"))
