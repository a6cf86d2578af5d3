"""The two pools: KV blocks and state slots."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PoolViews(Protocol):
    """What the models see of the pools: per-layer views, strided over pages."""

    def kv(self, layer: int) -> Tensor:
        """[B, 2, V, block_tokens, D] strided over B; attention layers in model order, then the MTP's attention layers."""
        ...

    def conv(self, layer: int) -> Tensor:
        """[S, k-1, C] strided over S, oldest column first; recurrent layers in model order."""
        ...

    def ssm(self, layer: int) -> Tensor:
        """[S, H, P, N] strided over S; recurrent layers in model order."""
        ...
