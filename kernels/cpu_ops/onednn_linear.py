"""Linear layers over oneDNN's packed weights: fp32, each row's bits the same beside any number of other rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROWS = 2
"""A single row may take another path (matrix times vector, other rounding), so it is computed beside an empty one."""
PACK_FOR_ROWS = 512
"""The layout that oneDNN would choose for this many rows; it serves every number of rows."""


@dataclass(frozen=True, slots=True)
class OnednnWeight:
    """A weight [out, in] in oneDNN's own blocked layout; the original is not kept."""

    packed: Tensor
    out_features: int
    in_features: int


def pack(weight: Tensor) -> OnednnWeight:
    assert weight.dtype == torch.float32, "the torch ops are fp32"
    out_features, in_features = weight.shape
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_FOR_ROWS)
    return OnednnWeight(packed, out_features, in_features)


def linear(x: Tensor, weight: OnednnWeight, activation: str = "none") -> Tensor:
    """x [T, in] -> [T, out]; ``activation`` is oneDNN's name, 'none' or 'relu'."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, weight.out_features)
    if num_rows < MIN_ROWS:
        x = torch.cat([x, x.new_zeros(MIN_ROWS - num_rows, weight.in_features)])
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight.packed, None, activation, [], "")
    return out[:num_rows]
