"""A tiny checkpoint with a tokenizer of 40 tokens, and engines that are whole when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine import Engine
from tests.engine.engine_kit import VOCAB, assert_whole, write_checkpoint

END, WORDS = 1, ("▁", "▁the", "▁cat", "▁and", "s", "the")
EMOJI = "😀"


class MakeEngine(Protocol):
    def __call__(self, path: Path | None = None, **settings: Any) -> Engine: ...


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("offline") / "model")
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path


def tiny_tokenizer() -> Tokenizer:
    """Words, letters and the bytes of one emoji; </s> is the checkpoint's EOS."""
    emoji = [f"<0x{byte:02X}>" for byte in EMOJI.encode()]
    tokens = ["<unk>", "</s>", *WORDS, *emoji]
    tokens += [chr(ord("A") + i) for i in range(VOCAB - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(path: Path | None = None, **settings: Any) -> Engine:
        defaults: dict[str, Any] = {"block_tokens": 4, "kv_blocks": 100, "kernels": "torch"}
        engine = Engine(path or checkpoint, **(defaults | settings))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        assert_whole(engine.core)
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()
