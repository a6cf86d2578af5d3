"""Tokens to text as they come. A character is shown when all its bytes are there, never in halves.

The pieces of one output, put together, are what the tokenizer makes of all its tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

BROKEN = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is left when the output has ended: bytes that never became a character, as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: each token is some bytes, whatever stands around it. The common and the quick case."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        """``token_bytes`` has no entry for tokens without text."""
        self._bytes_of = token_bytes.get
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decode(b"".join([self._bytes_of(token_id, b"") for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of the last tokens, twice, and shows the difference.

    The window begins with the end of the prompt, so that a first word keeps the space before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_tail: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_tail)
        self._shown = len(self._window)
        """So many tokens of the window are shown already."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._difference()

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._difference()
        if not text or text.endswith(BROKEN):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text

    def _difference(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]
