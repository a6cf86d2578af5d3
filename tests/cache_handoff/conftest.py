"""A tiny checkpoint for both workers in one process; the shipped one for whole servers, prompts, and what a plain process answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo import CHECKPOINT
from tests.cache_handoff.load_kit import alone, make_prompts
from tests.engine.engine_kit import write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="session")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """One process, no speculation, no cache."""
    return alone(model, prompts)
