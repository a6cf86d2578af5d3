"""One step as tensors: what the models read. Built from rows, never guessed from lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.rows import Row, RowKind
from kernels.contract import SINK, AttentionRows, PrefillRows, WindowRows

Ints = NDArray[np.int64]

PLACEHOLDER = 0
"""The token that a window's placeholders read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """T tokens: those of START and EXTEND rows first, then the windows (R·W tokens), each row's tokens adjacent."""

    token_ids: Tensor
    """int64 [T]; PLACEHOLDER for placeholders."""
    kv_index: Tensor
    """int64 [T]: block·block_tokens + offset; in the sink block for placeholders and for what is known already."""
    num_prefill_tokens: int
    prefill: PrefillRows | None
    """Over tokens [0, num_prefill_tokens). None when the step has no such row."""
    window: WindowRows | None
    """Over the rest. None when the step has no such row."""
    attention: AttentionRows
    """Over all T tokens."""


def build_step(rows: Sequence[Row], block_tokens: int) -> StepTensors:
    """Rows in batch order: START and EXTEND first, then VERIFY and SINK, all windows of one width.

    Placeholders read one token, write their KV to the sink block and see the row's real keys only, so that what they
    compute is finite, goes to scratch, and is known to nobody.
    """
    prefill = [row for row in rows if not row.kind.is_window]
    windows = [row for row in rows if row.kind.is_window]
    assert [*prefill, *windows] == list(rows), "prefill rows come before windows"
    lengths = [len(row.slots_out) if row.kind.is_window else len(row.token_ids) for row in rows]
    tokens = [_padded(np.asarray(row.token_ids, dtype=np.int64), length, PLACEHOLDER) for row, length in zip(rows, lengths, strict=True)]
    indices = [_row_kv_index(row, length, block_tokens) for row, length in zip(rows, lengths, strict=True)]
    num_keys = [_num_keys(row.first, len(row.token_ids), length) for row, length in zip(rows, lengths, strict=True)]
    return StepTensors(
        token_ids=torch.from_numpy(np.concatenate(tokens)),
        kv_index=torch.from_numpy(np.concatenate(indices)),
        num_prefill_tokens=sum(lengths[: len(prefill)]),
        prefill=_prefill_rows(prefill) if prefill else None,
        window=_window_rows(windows) if windows else None,
        attention=attention_rows(lengths, [row.blocks for row in rows], num_keys),
    )


def attention_rows(lengths: Sequence[int], tables: Sequence[Sequence[int]], num_keys: Sequence[Ints], first_key: int = 0) -> AttentionRows:
    """Per row: its number of tokens, its blocks in order, and each token's num_keys."""
    return AttentionRows(
        cu_tokens=_cumulative(lengths),
        block_table=_block_table(tables),
        num_keys=torch.from_numpy(np.concatenate(num_keys).astype(np.int32)),
        first_key=first_key,
    )


def kv_index(blocks: Sequence[int], first: int, count: int, block_tokens: int) -> Ints:
    """int64 [count]: where positions [first, first+count) lie in the pool. ``blocks`` cover them."""
    first_block = first // block_tokens
    table = np.asarray(blocks[first_block : -(-(first + count) // block_tokens)], dtype=np.int64)
    positions = np.arange(first, first + count, dtype=np.int64)
    return table[positions // block_tokens - first_block] * block_tokens + positions % block_tokens


def _row_kv_index(row: Row, length: int, block_tokens: int) -> Ints:
    index = kv_index(row.blocks, row.first, len(row.token_ids), block_tokens)
    index[: max(row.kv_known - row.first, 0)] = SINK * block_tokens
    return _padded(index, length, SINK * block_tokens)


def _num_keys(first: int, real: int, length: int) -> Ints:
    """A real token sees every key up to its own; a placeholder sees those of the real tokens, never its own."""
    return np.minimum(np.arange(first + 1, first + length + 1, dtype=np.int64), first + real)


def _padded(values: Ints, length: int, fill: int) -> Ints:
    return values if len(values) == length else np.concatenate([values, np.full(length - len(values), fill, dtype=np.int64)])


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _block_table(tables: Sequence[Sequence[int]]) -> Tensor:
    table = np.full((len(tables), max(1, *(len(blocks) for blocks in tables))), SINK, dtype=np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    return torch.from_numpy(table)


def _prefill_rows(rows: Sequence[Row]) -> PrefillRows:
    return PrefillRows(
        cu_tokens=_cumulative([len(row.token_ids) for row in rows]),
        has_state=torch.tensor([row.kind is RowKind.EXTEND for row in rows]),
        slot_in=torch.tensor([row.slot_in for row in rows], dtype=torch.int32),
        slot_out=torch.tensor([row.slots_out[0] for row in rows], dtype=torch.int32),
    )


def _window_rows(rows: Sequence[Row]) -> WindowRows:
    width = len(rows[0].slots_out)
    assert all(len(row.slots_out) == width for row in rows), "all windows of a step have one width"
    return WindowRows(
        width=width,
        slot_in=torch.tensor([row.slot_in for row in rows], dtype=torch.int32),
        slots_out=torch.tensor([row.slots_out for row in rows], dtype=torch.int32),
    )
