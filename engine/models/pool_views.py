"""What a model sees of the pools: one strided view per layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PoolViews(Protocol):
    """Layers count by kind, in model order. Views share memory with the pools; ops write through them."""

    def kv(self, layer: int) -> Tensor:
        """[B, 2, V, block_tokens, D] strided over B; attention layers in model order, then MTP's."""
        ...

    def conv(self, layer: int) -> Tensor:
        """[S, k-1, C] strided over S; recurrent layers in model order."""
        ...

    def ssm(self, layer: int) -> Tensor:
        """[S, H, P, N] strided over S; recurrent layers in model order."""
        ...
