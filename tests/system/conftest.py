"""One real cluster for most tests: a router, one prefill worker, and one decode worker that is replaced when another K is wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import demo
from demo.files import CONFIG, EOS_TOKEN_IDS, write_config, write_weights
from demo.tokenizer import unprintable_tokens
from demo.weights import make_weights
from engine import Engine
from engine.models.nemotron_h_config import parse_config
from protocol.sampling import SamplingParams
from tests.system.cluster_kit import Cluster

MAX_MODEL_LEN = 1024
RANDOM_CONFIG: dict[str, Any] = CONFIG | {
    "hybrid_override_pattern": "M-*-M*-",
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
}

Alone = Callable[..., list[list[int]]]


def make_random_model(folder: Path, seed: int) -> None:
    """The shipped tokenizer and random weights: unlike the trained ones' text, theirs goes on to any length, and drafts are half right."""
    for file in demo.CHECKPOINT.glob("*token*.json"):
        shutil.copy(file, folder)
    write_config(folder, RANDOM_CONFIG, EOS_TOKEN_IDS)
    unlikely = unprintable_tokens(Tokenizer.from_file(str(folder / "tokenizer.json")))
    write_weights(folder, make_weights(parse_config(RANDOM_CONFIG), unlikely=unlikely, seed=seed, dtype=torch.bfloat16))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, seed=2)
    return folder


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes, other weights."""
    folder = tmp_path_factory.mktemp("other-model")
    make_random_model(folder, seed=1)
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
