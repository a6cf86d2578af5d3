"""A tiny checkpoint directory, and routers that live as long as a test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from router.tokenizer import Tokenizer
from tests.router.harness import CHAT_TEMPLATE, EOS, MODEL_LEN, SPECIAL, Harness, StartRouter, running


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of a checkpoint that the router reads: a byte-level BPE of 320 tokens, template, lengths."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    directory.mkdir()
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, the cat sat on the mat and the dog sat on the log " * 20], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "nemotron_h", "vocab_size": 320, "max_position_embeddings": MODEL_LEN}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": SPECIAL.index(EOS)}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": EOS}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture
async def start_router(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[StartRouter]:
    """Routers with these settings; all end with the test, and none may be left with a request."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> Harness:
            return await stack.enter_async_context(running(model_dir, tokenizer, settings))

        yield start


@pytest.fixture
async def harness(start_router: StartRouter) -> Harness:
    return await start_router()
