"""One tiny checkpoint with room for long prompts, and one loaded model for all tests of the cache."""

from __future__ import annotations

import json

import pytest
import torch

from tests.engine.engine_kit import MakeCore, write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_core(tmp_path_factory: pytest.TempPathFactory) -> MakeCore:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16384}))
    return MakeCore(path)
