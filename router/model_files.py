"""What the router reads from the checkpoint directory: tokenizer, chat template, and a few numbers. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from router.chat_template import ChatTemplate, load_chat_template
from router.tokenizer import Tokenizer, read_json

DEFAULT_MODEL_LEN = 2048
"""When neither checkpoint nor worker says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    name: str
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model_files(directory: Path, name: str | None) -> ModelFiles:
    """Raises ConfigError that names the file and what is wrong with it."""
    if not directory.is_dir():
        raise ConfigError(f"model={str(directory)!r} is not a directory")
    config = read_json(directory / "config.json")
    if not config:
        raise ConfigError(f"model={str(directory)!r} has no config.json")
    tokenizer = Tokenizer(directory)
    vocab_size = _number(config, "vocab_size", directory)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, config.json's vocab_size is {vocab_size}")
    return ModelFiles(
        name=name or directory.resolve().name,
        model_type=str(config.get("model_type", "")),
        vocab_size=vocab_size,
        max_model_len=_number(config, "max_position_embeddings", directory, DEFAULT_MODEL_LEN),
        eos_token_ids=_eos_token_ids(read_json(directory / "generation_config.json"), config),
        tokenizer=tokenizer,
        chat_template=load_chat_template(directory),
    )


def _number(config: Mapping[str, Any], key: str, directory: Path, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{directory / 'config.json'}: {key}={value!r} is not a positive number")
    return value


def _eos_token_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Of the first that has any: one id or a list."""
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
