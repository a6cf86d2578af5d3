"""Tokens to text as they come: never half a character, and in the end what the tokenizer says of all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from router.detokenizer import BROKEN, Detokenizer, WindowDetokenizer
from router.tokenizer import Tokenizer


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(token_ids=st.lists(st.integers(min_value=0, max_value=319), max_size=30), skip=st.booleans())
def test_pieces_make_up_the_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    pieces = stream(tokenizer.detokenizer((), skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20))
def test_no_character_is_shown_in_halves(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer.detokenizer((), skip_special_tokens=True), token_ids)
    assert "".join(pieces) == text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


def test_an_emoji_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(token_ids) == 4
    assert stream(tokenizer.detokenizer((), skip_special_tokens=True), token_ids) == ["", "", "", "🎉", ""]


def test_an_emoji_that_never_ends_is_shown_broken_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a🎉", add_special_tokens=False)[:-1]
    assert stream(tokenizer.detokenizer((), skip_special_tokens=True), token_ids) == ["a", "", "", "", BROKEN]


def test_ids_without_a_token_are_silent(tokenizer: Tokenizer) -> None:
    assert tokenizer.detokenizer((), skip_special_tokens=True).push([319, 5000]) == tokenizer.decode([319])


def test_many_tokens_at_once_are_the_same_as_one_by_one(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the cat 🎉 sat", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=True)
    assert detokenizer.push(token_ids) + detokenizer.flush() == "the cat 🎉 sat"


@pytest.fixture(scope="module")
def word_tokenizer() -> FastTokenizer:
    """SentencePiece's way: a word has its space before it, and bytes stand for what isn't in the vocabulary."""
    words = ["<unk>", "▁hello", "▁world", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = FastTokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def window(tokenizer: FastTokenizer, prompt: list[int]) -> WindowDetokenizer:
    return WindowDetokenizer(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), prompt)


def test_a_first_word_keeps_its_space_after_a_prompt(word_tokenizer: FastTokenizer) -> None:
    assert stream(window(word_tokenizer, [1]), [2, 3]) == [" world", "s", ""]


def test_a_first_word_has_no_space_without_a_prompt(word_tokenizer: FastTokenizer) -> None:
    assert stream(window(word_tokenizer, []), [1, 2]) == ["hello", " world", ""]


def test_byte_tokens_wait_for_their_character(word_tokenizer: FastTokenizer) -> None:
    token_ids = [1, *(4 + byte for byte in "é".encode()), 2]
    assert stream(window(word_tokenizer, []), token_ids) == ["hello", "", "é", " world", ""]


def test_byte_tokens_without_an_end_are_shown_broken_at_the_end(word_tokenizer: FastTokenizer) -> None:
    assert stream(window(word_tokenizer, []), [1, 4 + "é".encode()[0]])[-1] == BROKEN
