"""One step as tensors: what the models read. Built from rows, never guessed from lengths."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.contract import AttentionRows, PrefillRows, WindowRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """T tokens: those of START and EXTEND rows first, then the windows (R·W tokens), each row's tokens adjacent."""

    token_ids: Tensor
    """int64 [T]; 0 for placeholders."""
    kv_index: Tensor
    """int64 [T]: block·block_tokens + offset; in the sink block for placeholders."""
    num_prefill_tokens: int
    prefill: PrefillRows | None
    """Over tokens [0, num_prefill_tokens). None when the step has no such row."""
    window: WindowRows | None
    """Over the rest. None when the step has no such row."""
    attention: AttentionRows
    """Over all T tokens."""
