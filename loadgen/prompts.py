"""Plain prompts: where their text comes from, and how long they and their answers are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from loadgen.swe.words import WORDS


class Shape(StrEnum):
    """Of lengths. ``uniform``: from half of the mean to one and a half. ``sharegpt``: lognormal with that mean and sigma 1, cut at
    four times the mean: many short ones and a long tail, as in chats."""

    UNIFORM = "uniform"
    SHAREGPT = "sharegpt"


MEANS = {Shape.UNIFORM: (128, 64), Shape.SHAREGPT: (161, 338)}
"""Prompt and answer, when nothing is said; of sharegpt, in tokens, as serving papers tell them of those conversations."""
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    shape: Shape
    prompt: int
    """Mean, in words of random prompts: a token or two each, the report has the server's count."""
    output: int
    """Mean, in tokens."""

    def draw(self, random: Random) -> tuple[int, int]:
        return _draw(random, self.shape, self.prompt), _draw(random, self.shape, self.output)


def random_prompts(seed: int, count: int, lengths: Lengths) -> Iterator[Prompt]:
    """Random words: nothing in them can be cached."""
    random = Random(seed)
    for _ in range(count):
        num_words, max_tokens = lengths.draw(random)
        yield Prompt(" ".join(random.choices(WORDS, k=num_words)), max_tokens)


def file_prompts(texts: Sequence[str], seed: int, count: int, lengths: Lengths) -> Iterator[Prompt]:
    """In order, again from the beginning when there are fewer than ``count``."""
    random = Random(seed)
    for number in range(count):
        yield Prompt(texts[number % len(texts)], lengths.draw(random)[1])


def read_prompts(path: Path) -> list[str]:
    """One per line; in a file that ends with ``.jsonl`` each line is a JSON string or an object with ``prompt``. Raises ValueError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts_file={path} can't be read: {error}") from error
    if not lines:
        raise ValueError(f"prompts_file={path} is empty")
    return [_text(path, number, line) for number, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _text(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"prompts_file={path}, line {number} is not JSON: {error}") from None
    text = entry.get("prompt") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(f"prompts_file={path}, line {number} has no prompt")
    return text


def _draw(random: Random, shape: Shape, mean: int) -> int:
    if shape is Shape.UNIFORM:
        return max(1, random.randint(math.ceil(mean / 2), math.floor(mean * 1.5)))
    mu = math.log(mean) - SIGMA**2 / 2
    return min(4 * mean, max(1, round(random.lognormvariate(mu, SIGMA))))
