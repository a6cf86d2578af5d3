"""Text that grows with its tokens: whole characters only, and in sum the text of all tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.tokenizer import GrowingText, load_tokenizer
from protocol.errors import CheckpointError

BROKEN = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Tokenizer:
    """Bytes and a few merges; <end> is special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"])
    tokenizer.train_from_iterator(["the cat and the dog, the 😀 and the é"] * 5, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Sentencepiece style: words with a leading ▁, everything else as <0x..> bytes, the first space stripped."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "the"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    text = GrowingText(tokenizer, prompt)
    return [text.push([token]) for token in output]


def fallback_ids(text: str) -> list[int]:
    return [7 + byte for byte in text.encode()]


@given(st.text(max_size=12), st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_byte_level_pieces_are_whole_and_add_up(prompt: str, output: str) -> None:
    got = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(prompt).ids, BYTE_LEVEL.encode(output).ids)
    assert "".join(got) == output.rstrip(BROKEN) or BROKEN in output
    assert BROKEN in output or not any(BROKEN in piece for piece in got)


@given(st.lists(st.integers(1, 279), max_size=4), st.lists(st.integers(0, 279), max_size=24))
@settings(max_examples=300, deadline=None)
def test_any_byte_level_tokens_add_up_to_the_whole_but_for_an_unfinished_end(prompt: list[int], output: list[int]) -> None:
    size = BYTE_LEVEL.get_vocab_size()
    prompt, output = [token % size for token in prompt], [token % size for token in output]
    clean = [*BYTE_LEVEL.encode("x").ids, *prompt, *BYTE_LEVEL.encode("y").ids]
    everything = BYTE_LEVEL.decode([*clean, *output])
    got = "".join(pieces(BYTE_LEVEL, clean, output))
    missing = everything[len(BYTE_LEVEL.decode(clean)) + len(got) :]
    assert everything == BYTE_LEVEL.decode(clean) + got + missing
    assert missing in ("", BROKEN, BROKEN * 2, BROKEN * 3)


def test_push_of_many_is_the_sum_of_pushes_of_one() -> None:
    ids = BYTE_LEVEL.encode("the 😀 and é").ids
    assert GrowingText(BYTE_LEVEL, []).push(ids) == "".join(pieces(BYTE_LEVEL, [], ids)) == "the 😀 and é"


def test_an_emoji_comes_with_its_last_byte() -> None:
    tokenizer = BYTE_FALLBACK
    assert pieces(tokenizer, [3], fallback_ids("😀!")) == ["", "", "", "😀", "!"]


def test_a_character_that_begins_in_the_prompt_comes_whole() -> None:
    ids = fallback_ids("😀")
    assert pieces(BYTE_FALLBACK, [3, *ids[:2]], ids[2:]) == ["", "😀"]


@pytest.mark.parametrize("prompt", [f"x{BROKEN}", BROKEN * 4, BROKEN])
def test_what_was_broken_in_the_prompt_is_not_given_out(prompt: str) -> None:
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(prompt).ids, BYTE_LEVEL.encode("cat").ids)) == "cat"


def test_an_unfinished_end_is_left_out() -> None:
    assert pieces(BYTE_FALLBACK, [3], fallback_ids("a😀")[:-1]) == ["a", "", "", ""]


def test_bytes_that_can_never_become_a_character_come_as_broken_ones() -> None:
    continuation = BYTE_LEVEL.token_to_id("©")  # byte 0xA9
    assert continuation is not None
    assert "".join(pieces(BYTE_LEVEL, [], [continuation, *BYTE_LEVEL.encode("cat").ids])) == BROKEN + "cat"


def test_the_space_before_the_first_word_is_kept() -> None:
    assert pieces(BYTE_FALLBACK, [3], [4, 5, 3]) == [" cat", "s", " the"]


def test_special_tokens_have_no_text_and_do_not_swallow_the_next_space() -> None:
    assert pieces(BYTE_FALLBACK, [3], [1, 4]) == ["", " cat"]
    assert pieces(BYTE_FALLBACK, [3], [4, 1, 1, 4]) == [" cat", "", "", " cat"]


def test_no_file_means_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("the cat").ids == BYTE_LEVEL.encode("the cat").ids
