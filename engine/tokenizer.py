"""Text for the offline engine: tokenizer.json of a checkpoint directory, and text that grows with its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from protocol.errors import CheckpointError

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3
"""Decoders show the bytes of an unfinished character as one to three broken ones."""
_PROMPT_TAIL = 6
"""Prompt tokens that the decoder sees as left context: whether a token starts with a space can depend on its neighbour."""


def load_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """None when the directory has no tokenizer.json: such a checkpoint speaks token ids only. Raises CheckpointError."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: {error}") from error


class GrowingText:
    """Text of an output that follows a prompt, piece by piece, without special tokens.

    A character whose bytes are spread over tokens comes when it is whole. If the output ends inside one, it is left out.
    Otherwise the pieces add up to what decoding everything at once gives behind the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_PROMPT_TAIL:])
        """Left context, then the tokens whose text isn't all given out yet."""
        self._prompt = self._decode(self._ids)
        self._context = _whole(self._prompt)
        """The part of the text of ``_ids`` that is given out, or is the prompt's."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete; may be empty."""
        return "".join([self._push(token) for token in tokens])

    def _push(self, token: int) -> str:
        num_context = len(self._ids)
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = _whole(text)
        if len(self._context) < len(self._prompt) and whole.startswith(self._prompt):
            self._context = self._prompt  # what was broken at the prompt's end stays so, and is the prompt's
        piece = whole[len(self._context) :]
        self._context += piece
        if whole == text:
            self._forget(num_context)
        return piece

    def _forget(self, num_ids: int) -> None:
        """Drop the first ids as context, unless the rest has no text to be context."""
        rest = self._decode(self._ids[num_ids:])
        if rest and _whole(rest) == rest:
            self._ids, self._context, self._prompt = self._ids[num_ids:], rest, ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _whole(text: str) -> str:
    """``text`` without the broken characters at its end that the next tokens may still mend."""
    held = min(_MAX_HELD, len(text) - len(text.rstrip(_BROKEN)))
    return text[: len(text) - held]
