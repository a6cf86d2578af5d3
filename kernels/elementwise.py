"""Activations whose bits depend on the element alone, never on where it lies in the tensor.

torch's own ``silu``, ``sigmoid`` and ``softplus`` treat the last few elements of a tensor (and of each thread's share)
with a scalar exponential that rounds otherwise than the vector one, so a token's bits would change with the batch around
it. ``exp`` and ``log1p`` do not have that seam; everything here is built on them and on correctly rounded arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

SOFTPLUS_LINEAR_ABOVE = 20.0
"""Above this, softplus(x) is x: the convention of every Mamba-2 checkpoint."""


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, torch.log1p(torch.exp(x)))


def relu2(x: Tensor) -> Tensor:
    positive = x.clamp(min=0.0)
    return positive * positive
