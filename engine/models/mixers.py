"""The four mixers of Nemotron-H. Each takes the normed input [T, d] of its block and returns what is added to it.

Mamba-2: Dao & Gu 2024, arXiv 2405.21060. The rest is as NVIDIA published the family; tests compare with transformers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import StepTensors
from engine.models.nemotron_h_config import NemotronHConfig
from engine.models.pool_views import PoolViews
from engine.models.weights import Weights
from kernels.contract import AttentionRows, Ops


class Mixer(Protocol):
    def __call__(self, u: Tensor, batch: StepTensors, pools: PoolViews) -> Tensor:
        """[T, d] -> [T, d]. Reads and writes the layer's own pages."""
        ...


class Mamba2:
    """[z | xBC | dt] = in_proj(u); xBC = silu(conv(xBC)); y = ssm(x, dt, B, C); out_proj(norm(y·silu(z)))."""

    def __init__(self, config: NemotronHConfig, weights: Weights, ops: Ops, layer: int) -> None:
        self.ops, self.layer = ops, layer
        self.heads, self.head_dim, self.groups, self.state = (
            config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size,
        )  # fmt: skip
        self.eps, self.chunk = config.layer_norm_epsilon, config.chunk_size
        self.dt_limit = config.time_step_limit
        self.conv_pieces = list(config.conv_pieces)
        self.in_pieces = [config.mamba_width, sum(config.conv_pieces), config.mamba_num_heads]
        self.in_proj = ops.pack_linear(weights["in_proj.weight"])
        self.out_proj = ops.pack_linear(weights["out_proj.weight"])
        self.conv_weight = weights["conv1d.weight"].squeeze(1).contiguous()
        self.conv_bias = weights["conv1d.bias"] if config.use_conv_bias else None
        self.a = -torch.exp(weights["A_log"])
        self.d, self.dt_bias = weights["D"], weights["dt_bias"]
        self.norm = weights["norm.weight"]

    def __call__(self, u: Tensor, batch: StepTensors, pools: PoolViews) -> Tensor:
        z, xbc, dt = self.ops.linear(u, self.in_proj).split_with_sizes(self.in_pieces, -1)
        y = self._scan(self._conv(xbc, batch, pools.conv(self.layer)), dt, batch, pools.ssm(self.layer))
        return self.ops.linear(self.ops.gated_group_rms_norm(y, z, self.norm, self.groups, self.eps), self.out_proj)

    def _conv(self, xbc: Tensor, batch: StepTensors, windows: Tensor) -> Tensor:
        """[T, C] -> [T, C], prefill rows first, window rows after. Most steps have one kind of row, and nothing to cut or join."""
        constants = (self.conv_weight, self.conv_bias, windows)
        if batch.prefill is None:
            assert batch.window is not None, "a step has rows"
            return self.ops.conv_window(xbc, *constants, batch.window)
        if batch.window is None:
            return self.ops.conv_prefill(xbc, *constants, batch.prefill)
        split = batch.num_prefill_tokens
        return torch.cat(
            [self.ops.conv_prefill(xbc[:split], *constants, batch.prefill), self.ops.conv_window(xbc[split:], *constants, batch.window)]
        )

    def _scan(self, xbc: Tensor, dt: Tensor, batch: StepTensors, states: Tensor) -> Tensor:
        """[T, C], [T, H] -> [T, I]."""
        tokens = xbc.shape[0]
        x, b, c = xbc.split_with_sizes(self.conv_pieces, -1)
        x = x.view(tokens, self.heads, self.head_dim)
        b = b.view(tokens, self.groups, self.state)
        c = c.view(tokens, self.groups, self.state)
        constants = (self.a, self.d, self.dt_bias, self.dt_limit, states)
        if batch.prefill is None:
            assert batch.window is not None, "a step has rows"
            return self.ops.mamba2_update(x, dt, b, c, *constants, batch.window).flatten(1)
        if batch.window is None:
            return self.ops.mamba2_scan(x, dt, b, c, *constants, batch.prefill, self.chunk).flatten(1)
        split = batch.num_prefill_tokens
        parts = [
            self.ops.mamba2_scan(x[:split], dt[:split], b[:split], c[:split], *constants, batch.prefill, self.chunk),
            self.ops.mamba2_update(x[split:], dt[split:], b[split:], c[split:], *constants, batch.window),
        ]
        return torch.cat(parts).flatten(1)


class Attention:
    """Grouped-query attention without positions: softmax(q·kᵀ / √D)·v over the request's pages."""

    def __init__(self, config: NemotronHConfig, weights: Weights, ops: Ops, layer: int) -> None:
        self.ops, self.layer = ops, layer
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.kv_heads, config.head_dim
        self.scale = self.head_dim**-0.5
        self.q_proj = ops.pack_linear(weights["q_proj.weight"])
        self.kv_proj = ops.pack_linear(weights.stacked("k_proj.weight", "v_proj.weight"))
        self.o_proj = ops.pack_linear(weights["o_proj.weight"])

    def __call__(self, u: Tensor, batch: StepTensors, pools: PoolViews) -> Tensor:
        return self.attend(u, batch.kv_index, batch.attention, pools)

    def attend(self, u: Tensor, kv_index: Tensor, rows: AttentionRows, pools: PoolViews) -> Tensor:
        """u [T, d], kv_index [T] -> [T, d]. Writes the KV of all tokens first, so that each can see its own."""
        self.write_kv(u, kv_index, pools)
        query = self.ops.linear(u, self.q_proj).view(u.shape[0], self.heads, self.head_dim)
        seen = self.ops.paged_attention(query, pools.kv(self.layer), rows, self.scale)
        return self.ops.linear(seen.flatten(1), self.o_proj)

    def write_kv(self, u: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        """KV of u [T, d] to the pages that kv_index [T] names; the part of ``attend`` that lasts."""
        key, value = self.ops.linear(u, self.kv_proj).view(u.shape[0], 2, self.kv_heads, self.head_dim).unbind(1)
        self.ops.write_kv(key, value, pools.kv(self.layer), kv_index)


class Mlp:
    """down(relu²(up(u)))."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self.ops = ops
        self.up_proj = ops.pack_linear(weights["up_proj.weight"])
        self.down_proj = ops.pack_linear(weights["down_proj.weight"])

    def __call__(self, u: Tensor, batch: StepTensors, pools: PoolViews) -> Tensor:
        return self.apply(u)

    def apply(self, u: Tensor) -> Tensor:
        return self.ops.linear(self.ops.linear(u, self.up_proj, relu2=True), self.down_proj)


class Moe:
    """shared(u) + fc2(Σ chosen experts(fc1(u))); fc1 and fc2 only when the experts work in a latent width."""

    def __init__(self, config: NemotronHConfig, weights: Weights, ops: Ops) -> None:
        experts = config.n_routed_experts or 0
        self.ops = ops
        self.top_k, self.normalise, self.scaling = config.num_experts_per_tok or 0, config.norm_topk_prob, config.routed_scaling_factor
        self.gate = weights["gate.weight"]
        self.correction_bias = weights["gate.e_score_correction_bias"]
        self.experts = ops.pack_experts(weights.experts("up_proj", experts), weights.experts("down_proj", experts))
        self.shared = Mlp(weights.under("shared_experts"), ops)
        latent = config.moe_latent_size is not None
        self.fc1 = ops.pack_linear(weights["fc1_latent_proj.weight"]) if latent else None
        self.fc2 = ops.pack_linear(weights["fc2_latent_proj.weight"]) if latent else None

    def __call__(self, u: Tensor, batch: StepTensors, pools: PoolViews) -> Tensor:
        return self.apply(u)

    def apply(self, u: Tensor) -> Tensor:
        ids, gains = self.ops.route(u, self.gate, self.correction_bias, self.top_k, self.normalise, self.scaling)
        routed = u if self.fc1 is None else self.ops.linear(u, self.fc1)
        routed = self.ops.experts(routed, self.experts, ids, gains)
        routed = routed if self.fc2 is None else self.ops.linear(routed, self.fc2)
        return routed + self.shared.apply(u)
