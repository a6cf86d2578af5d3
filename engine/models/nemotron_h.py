"""Nemotron-H: blocks of one mixer each, x += mixer(norm(x)), over paged KV and state slots.

The model holds weights and nothing else. What a token sees and where its state goes is said by the batch; all
arithmetic goes through ``kernels.contract.Ops``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from engine.batch import StepTensors
from engine.models.dims import ModelDims
from engine.models.mixers import Attention, Mamba2, Mixer, Mlp, Moe
from engine.models.mtp import MtpModule
from engine.models.nemotron_h_config import NemotronHConfig
from engine.models.pool_views import PoolViews
from engine.models.weights import Weights
from kernels.contract import AttentionRows, Ops


class Block(NamedTuple):
    norm: Tensor
    mixer: Mixer


class NemotronH:
    """``mtp`` is None when the module was not loaded; its methods may then not be called."""

    def __init__(self, config: NemotronHConfig, weights: Weights, ops: Ops, *, with_mtp: bool) -> None:
        self.dims = model_dims(config, with_mtp=with_mtp)
        self.ops, self.eps = ops, config.layer_norm_epsilon
        self.embeddings = weights["embeddings.weight"]
        self.blocks = list(_blocks(config, weights, ops))
        self.norm_f = weights["norm_f.weight"]
        self.head = ops.pack_linear(self.embeddings if config.tie_word_embeddings else weights["lm_head.weight"])
        self.mtp = MtpModule(config, weights, ops, self.dims.num_attention_layers) if with_mtp else None

    def forward(self, batch: StepTensors, pools: PoolViews) -> Tensor:
        """Hidden states after the final norm, [T, d]. KV and states are written where the batch says."""
        x = self.embeddings[batch.token_ids]
        for norm, mixer in self.blocks:
            x += mixer(self.ops.rms_norm(x, norm, self.eps), batch, pools)
        return self.ops.rms_norm(x, self.norm_f, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, d], after the final norm of the model or of MTP -> [M, vocab]."""
        return self.ops.linear(hidden, self.head)

    def mtp_write_kv(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        """KV of the pairs (hidden_t, token_{t+1}): token_ids int64 [M], hidden [M, d], kv_index int64 [M] of index t+1."""
        assert self.mtp is not None, "the checkpoint was loaded without MTP"
        self.mtp.write_kv(self.embeddings[token_ids], hidden, kv_index, pools)

    def mtp_forward(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, attention: AttentionRows, pools: PoolViews) -> Tensor:
        """The same pairs through the whole module -> m [M, d], whose ``logits`` predict token_{t+2}. Writes their KV too.

        ``attention.first_key`` must be 1. To draft on, m takes the place of hidden.
        """
        assert self.mtp is not None, "the checkpoint was loaded without MTP"
        assert attention.first_key == 1, "index 0 of MTP's KV is empty"
        return self.mtp.forward(self.embeddings[token_ids], hidden, kv_index, attention, pools)


def model_dims(config: NemotronHConfig, *, with_mtp: bool) -> ModelDims:
    kinds = Counter(config.layers_block_type)
    return ModelDims(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        max_position=config.max_position_embeddings,
        num_attention_layers=kinds["attention"],
        num_mtp_attention_layers=config.mtp_blocks.count("attention") if with_mtp else 0,
        attention_heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        num_recurrent_layers=kinds["mamba2"],
        ssm_heads=config.mamba_num_heads,
        ssm_head_dim=config.mamba_head_dim,
        ssm_state=config.ssm_state_size,
        ssm_groups=config.n_groups,
        conv_kernel=config.conv_kernel,
        conv_pieces=config.conv_pieces,
    )


def _blocks(config: NemotronHConfig, weights: Weights, ops: Ops) -> Iterator[Block]:
    """Attention and recurrent layers are counted by kind: that is how the pools number them."""
    seen: Counter[str] = Counter()
    for index, kind in enumerate(config.layers_block_type):
        part = weights.under(f"layers.{index}")
        yield Block(part["norm.weight"], _mixer(kind, config, part.under("mixer"), ops, seen[kind]))
        seen[kind] += 1


def _mixer(kind: str, config: NemotronHConfig, weights: Weights, ops: Ops, layer: int) -> Mixer:
    if kind == "mamba2":
        return Mamba2(config, weights, ops, layer)
    if kind == "attention":
        return Attention(config, weights, ops, layer)
    return Moe(config, weights, ops) if kind == "moe" else Mlp(weights, ops)
