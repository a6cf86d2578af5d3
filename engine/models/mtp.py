"""The multi-token-prediction module of Nemotron-H: a few sub-blocks over pairs (hidden_t, token_{t+1}).

The entry for a pair is stored at index t+1; index 0 stays empty. Then what exists after n tokens depends on these n
tokens only.

    u = eh_proj([enorm(Emb(x_{t+1})) ; hnorm(h_t)]);  u += mixer(norm(u)) for each sub-block;  m = final_layernorm(u)
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.mixers import Attention, Mlp, Moe
from engine.models.nemotron_h_config import NemotronHConfig
from engine.models.pool_views import PoolViews
from engine.models.weights import Weights
from kernels.contract import AttentionRows, Ops


class MtpModule:
    """Exactly one sub-block is attention (the configuration guarantees it), so KV needs only what comes before it."""

    def __init__(self, config: NemotronHConfig, weights: Weights, ops: Ops, kv_layer: int) -> None:
        self.ops, self.eps = ops, config.layer_norm_epsilon
        parts = [weights.under(f"mtp.layers.{index}") for index in range(len(config.mtp_blocks))]
        self.enorm, self.hnorm = parts[0]["enorm.weight"], parts[0]["hnorm.weight"]
        self.eh_proj = ops.pack_linear(parts[0]["eh_proj.weight"])
        self.final_norm = parts[-1]["final_layernorm.weight"]
        blocks = [
            (part["norm.weight"], _mixer(kind, config, part.under("mixer"), ops, kv_layer))
            for kind, part in zip(config.mtp_blocks, parts, strict=True)
        ]
        place = config.mtp_blocks.index("attention")
        self.before = [(norm, mixer) for norm, mixer in blocks[:place] if not isinstance(mixer, Attention)]
        self.after = [(norm, mixer) for norm, mixer in blocks[place + 1 :] if not isinstance(mixer, Attention)]
        self.attention_norm, attention = blocks[place]
        assert isinstance(attention, Attention)
        self.attention = attention

    def write_kv(self, embedded: Tensor, hidden: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        """embedded, hidden [M, d], kv_index [M]. The same KV, bit for bit, that ``forward`` writes for these pairs."""
        u = self._fused(embedded, hidden)
        self.attention.write_kv(self.ops.rms_norm(u, self.attention_norm, self.eps), kv_index, pools)

    def forward(self, embedded: Tensor, hidden: Tensor, kv_index: Tensor, rows: AttentionRows, pools: PoolViews) -> Tensor:
        """embedded, hidden [M, d], kv_index [M] -> m [M, d], after the final norm."""
        u = self._fused(embedded, hidden)
        u = u + self.attention.attend(self.ops.rms_norm(u, self.attention_norm, self.eps), kv_index, rows, pools)
        return self.ops.rms_norm(self._through(self.after, u), self.final_norm, self.eps)

    def _fused(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The residual stream where it enters the attention sub-block."""
        pair = torch.cat([self.ops.rms_norm(embedded, self.enorm, self.eps), self.ops.rms_norm(hidden, self.hnorm, self.eps)], dim=-1)
        return self._through(self.before, self.ops.linear(pair, self.eh_proj))

    def _through(self, blocks: list[tuple[Tensor, Mlp | Moe]], u: Tensor) -> Tensor:
        for norm, mixer in blocks:
            u = u + mixer.apply(self.ops.rms_norm(u, norm, self.eps))
        return u


def _mixer(kind: str, config: NemotronHConfig, weights: Weights, ops: Ops, kv_layer: int) -> Attention | Mlp | Moe:
    if kind == "attention":
        return Attention(config, weights, ops, kv_layer)
    return Moe(config, weights, ops) if kind == "moe" else Mlp(weights, ops)
