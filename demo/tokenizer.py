"""A byte-level BPE tokenizer, trained on the Python standard library, with the files that tokenizer loaders expect.

Pieces that matter to the driver's episodes are tokens from the start (``demo.phrases``); BPE learns the rest.
"""

from __future__ import annotations

import json
import sysconfig
from itertools import chain, islice, product
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.phrases import PIECE, WHOLE

PAD, BOS, EOS, TURN_START, TURN_END = "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN_START, TURN_END)
"""Their ids are their places here."""
CORPUS_BYTES = 3_000_000
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """The same tokenizer from the same Python release."""
    learner = _with_bytes(models.BPE())
    learner.train_from_iterator(library_texts(CORPUS_BYTES), _trainer(vocab_size))
    learned = json.loads(learner.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    whole = [_as_bytes(piece) for piece in WHOLE]
    while len(set(words).union(whole)) > vocab_size:
        words.pop()
    vocab = {word: index for index, word in enumerate(dict.fromkeys([*words, *whole]))}
    merges = [(first, second) for first, second in learned["merges"] if first + second in vocab and first in vocab and second in vocab]
    # ``ignore_merges``: a piece that is a token needs no merges to become one.
    tokenizer = _with_bytes(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.add_special_tokens(_special_tokens())
    assert tokenizer.get_vocab_size() == vocab_size, "the corpus is too small for this vocabulary"
    return tokenizer


def _as_bytes(piece: str) -> str:
    """As byte-level tokens spell it."""
    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
    return spelled


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per byte, for checkpoints whose text means nothing. The other ids, which only decode, are pairs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = (first + second for first, second in product(alphabet, repeat=2))
    words = islice(chain(SPECIAL_TOKENS, alphabet, pairs), vocab_size)
    tokenizer = _with_bytes(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(_special_tokens())
    assert tokenizer.get_vocab_size() == vocab_size, f"a byte tokenizer has {len(SPECIAL_TOKENS) + 256}..65536 tokens"
    return tokenizer


def _with_bytes(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECE), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trainer(vocab_size: int) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_special_tokens(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json (chat template inside) and special_tokens_map.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": TURN_END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(index): _described(token) for index, token in enumerate(SPECIAL_TOKENS)},
        "chat_template": CHAT_TEMPLATE.read_text(encoding="utf-8"),
    }
    _write_json(directory / "tokenizer_config.json", config | named)
    _write_json(directory / "special_tokens_map.json", named)


def _special_tokens() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]


def unprintable_tokens(tokenizer: Tokenizer) -> set[int]:
    """Special tokens, and those that are no readable text by themselves: control characters, parts of characters."""
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(tokenizer.get_vocab_size())]
    return {token for token, text in enumerate(texts) if not text or not (text.isascii() and text.replace("\n", " ").isprintable())}


def library_texts(limit: int) -> list[str]:
    """Modules at the top of the standard library in the order of their names, up to ``limit`` bytes."""
    texts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        size += len(text)
        if size > limit:
            break
        texts.append(text)
    return texts


def _described(token: str) -> dict[str, object]:
    return {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
