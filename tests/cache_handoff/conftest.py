"""A tiny checkpoint for both workers in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.engine_kit import write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))
