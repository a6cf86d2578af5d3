"""Logits of every kind of row equal those of transformers, which runs the whole prompt at once and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

MakeCheckpoint = Callable[..., Any]
LoadModel = Callable[..., Any]


def oracle_logits(checkpoint: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = checkpoint.oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    """fp32 rounding of logits of order 4: about 6e-6 was seen, a wrong formula gives 1e-3 and more."""
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


CHECKPOINTS = [
    ("dense", {}),
    ("dense", {"tie_word_embeddings": True}),
    ("moe", {}),
    ("latent-moe", {}),
    ("no-conv-bias", {}),
    ("no-attention", {}),
]


@pytest.mark.parametrize(("variant", "overrides"), CHECKPOINTS)
def test_a_prompt_in_one_chunk(
    variant: str, overrides: dict[str, Any], make_checkpoint: MakeCheckpoint, load: LoadModel, one_request: Any, prompt: list[int]
) -> None:
    checkpoint = make_checkpoint(variant, **overrides)
    model = load(checkpoint.path)
    hidden = one_request(model).chunk(prompt)
    expected = oracle_logits(checkpoint, prompt)
    assert expected.abs().max() > 2, "logits are too flat to tell a wrong model from a right one"
    assert_close(model.logits(hidden), expected)


def every_chunking(length: int) -> list[list[int]]:
    """All ways to cut ``length`` tokens into chunks."""
    if length == 0:
        return [[]]
    return [[first, *rest] for first in range(1, length + 1) for rest in every_chunking(length - first)]


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_every_chunking_of_a_short_prompt(
    variant: str, make_checkpoint: MakeCheckpoint, load: LoadModel, one_request: Any, prompt: list[int]
) -> None:
    checkpoint, short = make_checkpoint(variant), prompt[:6]
    model = load(checkpoint.path)
    expected = oracle_logits(checkpoint, short)
    for chunking in every_chunking(len(short)):
        request = one_request(model)
        hidden = torch.cat([request.chunk(short[request.length : request.length + size]) for size in chunking])
        assert_close(model.logits(hidden), expected)


@pytest.mark.parametrize("variant", ["dense", "latent-moe"])
@pytest.mark.parametrize("width", range(1, 9))
def test_windows_after_a_chunk(
    variant: str, width: int, make_checkpoint: MakeCheckpoint, load: LoadModel, one_request: Any, prompt: list[int]
) -> None:
    """Windows of any width, with any number of real positions, committed in part: what was not committed is never seen."""
    checkpoint = make_checkpoint(variant)
    model = load(checkpoint.path)
    expected = oracle_logits(checkpoint, prompt)
    request = one_request(model)
    request.chunk(prompt[:9])
    for real in (*range(1, width + 1), width):
        at = request.length
        if at + real > len(prompt):
            break
        wrong_drafts = [(token + 1) % 128 for token in prompt[at + 1 : at + real]]
        request.window([prompt[at], *wrong_drafts], width)
        hidden = request.window(prompt[at : at + real], width)
        assert_close(model.logits(hidden), expected[at : at + real])
        request.commit((real + 1) // 2)


def test_rows_of_one_step_do_not_see_each_other(
    make_checkpoint: MakeCheckpoint, load: LoadModel, one_request: Any, prompt: list[int]
) -> None:
    """A start, a continued prompt and two windows share a step; each gets what it gets alone."""
    from engine.batch import build_step
    from engine.pools import Pools
    from engine.rows import Row, RowKind

    checkpoint = make_checkpoint("moe")
    model = load(checkpoint.path)
    expected = oracle_logits(checkpoint, prompt)
    pools = Pools(model.dims, 40, 12, 4, torch.float32)
    tables = [list(range(1 + 7 * index, 8 + 7 * index)) for index in range(4)]

    def row(kind: RowKind, index: int, first: int, count: int, slots_out: list[int]) -> Row:
        tokens = prompt[first : first + count]
        return Row(kind=kind, first=first, token_ids=tokens, blocks=tables[index], slot_in=1 + index, slots_out=slots_out, samples=True)

    starts = [row(RowKind.START, index, 0, length, [1 + index]) for index, length in ((1, 5), (2, 8), (3, 11))]
    model.forward(build_step(starts, 4), pools)
    rows = [
        row(RowKind.START, 0, 0, 7, [1]),
        row(RowKind.EXTEND, 1, 5, 6, [2]),
        row(RowKind.VERIFY, 2, 8, 3, [5, 6, 7]),
        row(RowKind.VERIFY, 3, 11, 1, [8, 9, 10]),
    ]
    logits = model.logits(model.forward(build_step(rows, 4), pools))
    assert_close(logits[:7], expected[:7])
    assert_close(logits[7:13], expected[5:11])
    assert_close(logits[13:16], expected[8:11])
    assert_close(logits[16:17], expected[11:12])


@pytest.mark.parametrize("limit", [(0.0, 0.05), (0.02, 1.0)])
def test_time_step_limit_is_obeyed(
    limit: tuple[float, float], make_checkpoint: MakeCheckpoint, load: LoadModel, one_request: Any, prompt: list[int]
) -> None:
    """transformers ignores the field, but its scan takes the limits as an argument."""
    checkpoint = make_checkpoint("no-attention", time_step_limit=list(limit))
    model = load(checkpoint.path)
    for layer in checkpoint.oracle.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = limit
    expected = oracle_logits(checkpoint, prompt)
    request = one_request(model)
    hidden = torch.cat([request.chunk(prompt[:10]), request.window(prompt[10:14], 4)])
    assert_close(model.logits(hidden), expected[:14])
