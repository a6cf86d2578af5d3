"""The ops on torch and oneDNN alone: always available, fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import AttentionRows, PackedWeight, PrefillRows, WindowRows
from kernels.cpu_ops import onednn_linear, ragged_conv, ssd_scan, tiled_attention
from kernels.cpu_ops.onednn_linear import OnednnWeight
from kernels.elementwise import sigmoid, silu


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One pair of packed weights per expert."""

    up: list[OnednnWeight]
    down: list[OnednnWeight]


class TorchOps:
    """``kernels.contract.Ops`` in fp32. Long rows are scanned in chunks, so other chunks round otherwise."""

    name = "torch-onednn"
    chunk_invariant = False

    def pack_linear(self, weight: Tensor) -> OnednnWeight:
        return onednn_linear.pack(weight)

    def linear(self, x: Tensor, weight: PackedWeight, *, relu2: bool = False) -> Tensor:
        assert isinstance(weight, OnednnWeight)
        if not relu2:
            return onednn_linear.linear(x, weight)
        positive = onednn_linear.linear(x, weight, activation="relu")
        return positive.mul_(positive)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (x / _root_mean_square(x, eps)).mul_(weight)

    def gated_group_rms_norm(self, y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        gated = silu(gate).mul_(y)
        per_group = gated.view(gated.shape[0], groups, gated.shape[1] // groups)
        return per_group.div_(_root_mean_square(per_group, eps)).flatten(-2).mul_(weight)

    def conv_prefill(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: PrefillRows) -> Tensor:
        return ragged_conv.conv_prefill(x, weight, bias, windows, rows)

    def conv_window(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: WindowRows) -> Tensor:
        return ragged_conv.conv_window(x, weight, bias, windows, rows)

    def mamba2_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: PrefillRows,
        chunk: int,
    ) -> Tensor:
        return ssd_scan.scan(ssd_scan.prepare(x, dt, b, c, dt_bias, dt_limit), a, d, states, rows, chunk)

    def mamba2_update(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: WindowRows,
    ) -> Tensor:
        return ssd_scan.update(ssd_scan.prepare(x, dt, b, c, dt_bias, dt_limit), a, d, states, rows)

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, kv_index: Tensor) -> None:
        block_tokens = cache.shape[3]
        block, offset = kv_index // block_tokens, kv_index % block_tokens
        cache[:, 0].transpose(1, 2)[block, offset] = key
        cache[:, 1].transpose(1, 2)[block, offset] = value

    def paged_attention(self, query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        return tiled_attention.paged_attention(query, cache, rows, scale)

    def route(self, x: Tensor, gate: Tensor, correction_bias: Tensor, top_k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
        scores = sigmoid(onednn_linear.linear(x, onednn_linear.pack(gate)))
        # A stable sort, so that of two equal choices the lower id wins.
        ids = torch.sort(scores + correction_bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(-1, ids)
        if normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * scaling

    def pack_experts(self, up: Tensor, down: Tensor) -> PackedExperts:
        return PackedExperts([self.pack_linear(w) for w in up], [self.pack_linear(w) for w in down])

    def experts(self, x: Tensor, packed: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
        # Choice by choice [T·F, d_in], filled expert by expert, then summed in the order of f.
        chosen = ids.flatten()
        parts = x.new_empty(chosen.shape[0], x.shape[1])
        for expert in sorted(set(chosen.tolist())):
            choices = torch.nonzero(chosen == expert).flatten()
            inner = self.linear(x[choices // ids.shape[1]], packed.up[expert], relu2=True)
            parts[choices] = self.linear(inner, packed.down[expert])
        parts = parts.view(*ids.shape, x.shape[1]) * weights[:, :, None]
        out = parts[:, 0].clone()
        for f in range(1, ids.shape[1]):
            out += parts[:, f]
        return out


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    return torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
