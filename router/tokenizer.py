"""The checkpoint's tokenizer, as the router needs it: text to tokens once, tokens to text as they come, and what one token says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from protocol.errors import ConfigError
from router.detokenizer import BROKEN, ByteDetokenizer, Detokenizer, WindowDetokenizer

PROMPT_TAIL = 6
"""Prompt tokens that a WindowDetokenizer begins with."""


class Tokenizer:
    """Of ``tokenizer.json`` in a checkpoint directory. Raises ConfigError that names the file."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model={str(directory)!r} has no tokenizer.json")
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        self._special = {token_id for token_id, token in self._fast.get_added_tokens_decoder().items() if token.special}
        self._texts: dict[int, tuple[str, bytes]] = {}

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """In characters of the text, an upper bound: shorter prompts are not surely too long."""
        return max(len(token) for token in self._fast.get_vocab())

    @cached_property
    def is_byte_level(self) -> bool:
        decoder = json.loads(self._fast.to_str()).get("decoder") or {}
        return bool(decoder.get("type") == "ByteLevel")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """As they stand in the vocabulary; empty for ids without an entry."""
        return [self._fast.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self.is_byte_level:
            return ByteDetokenizer(self._plain_bytes if skip_special_tokens else self._all_bytes)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt[-PROMPT_TAIL:])

    def describe(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, for log-probabilities: its text, in the form ``bytes:\\xf0\\x9f`` if it's no whole characters, and its bytes."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self._describe(token_id)
        return known

    def _describe(self, token_id: int) -> tuple[str, bytes]:
        data = self._all_bytes.get(token_id, b"") if self.is_byte_level else self.decode([token_id], skip_special_tokens=False).encode()
        text = data.decode("utf-8", "replace")
        if BROKEN in text and self.is_byte_level:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text, data

    @cached_property
    def _all_bytes(self) -> dict[int, bytes]:
        byte_of = _byte_level_alphabet()
        return {token_id: _bytes_of(token, byte_of) for token, token_id in self._fast.get_vocab().items()}

    @cached_property
    def _plain_bytes(self) -> dict[int, bytes]:
        return {token_id: data for token_id, data in self._all_bytes.items() if token_id not in self._special}


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    """What the ByteLevel decoder makes of it: text that isn't in its alphabet (added tokens) stands for itself."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are their own character, the others follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON file; {} if it isn't there. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
