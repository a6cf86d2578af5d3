"""One real cluster for most tests: a router, one prefill worker, and one decode worker that is replaced when another K is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.make_checkpoint import make_checkpoint
from engine import Engine
from protocol.sampling import SamplingParams
from tests.system.cluster_kit import Cluster

MAX_MODEL_LEN = 1024

Alone = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes, other weights."""
    folder = tmp_path_factory.mktemp("other-model")
    make_checkpoint(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Router and prefill worker "p"; say ``use_speculation(K)`` for a decode worker."""
    cluster = Cluster(model, tmp_path_factory.mktemp("cluster"))
    cluster.start_router()
    cluster.start_worker("prefill", "p", "--max-prefill-chunk", "48", "--step-tokens", "96")
    yield cluster
    cluster.stop_all()


@pytest.fixture(scope="session")
def alone(model: Path) -> Alone:
    """alone(prompts, max_tokens=..., ...): the token ids of a single process with speculation off."""
    torch.set_num_threads(1)
    engine = Engine(model, threads=2)

    def generate(prompts: list[list[int]] | list[str], **params: Any) -> list[list[int]]:
        return [list(done.token_ids) for done in engine.generate(prompts, SamplingParams(**params))]

    return generate
