"""The definition of every op: plain loops over tokens, any float dtype. Slow, and nothing but clear.

Each token is computed by itself from the state before it, so nothing here depends on batch, window or chunk.
``linear`` is a product and a sum instead of a matrix product for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import AttentionRows, PackedWeight, PrefillRows, WindowRows
from kernels.elementwise import relu2, sigmoid, silu, softplus


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight as it came, [out, in]."""

    weight: Tensor

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """All experts as they came: up [E, m, d_in], down [E, d_in, m]."""

    up: Tensor
    down: Tensor


def matvec(weight: Tensor, vector: Tensor) -> Tensor:
    """weight [out, in] · vector [in] -> [out]."""
    return (weight * vector).sum(-1)


def conv_step(window: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One position: window [k-1, C] and token [C] -> (output [C], next window [k-1, C])."""
    taps = torch.cat([window, token[None]])
    total = (taps * weight.T).sum(0)
    return silu(total if bias is None else total + bias), taps[1:]


def mamba2_step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """One position: state [H, P, N], x [H, P], dt [H] (after softplus and clamp), b and c [G, N] -> (y [H, P], next state)."""
    heads, groups = x.shape[0], b.shape[0]
    group_of_head = torch.arange(heads) * groups // heads
    b, c = b[group_of_head], c[group_of_head]
    decay = torch.exp(dt * a)
    state = decay[:, None, None] * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
    return (state * c[:, None, :]).sum(-1) + d[:, None] * x, state


def time_step(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    return softplus(dt + dt_bias).clamp(*limit)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query [A, D] over keys and values [n, V, D] -> [A, D]. No keys: zeros."""
    if keys.shape[0] == 0:
        return torch.zeros_like(query)
    kv_head = torch.arange(query.shape[0]) * keys.shape[1] // query.shape[0]
    keys, values = keys[:, kv_head], values[:, kv_head]
    scores = (query * keys).sum(-1) * scale
    weights = torch.exp(scores - scores.amax(0))
    weights = weights / weights.sum(0)
    return (weights[:, :, None] * values).sum(0)


class ReferenceOps:
    """``kernels.contract.Ops`` by definition."""

    name = "reference"
    chunk_invariant = True

    def pack_linear(self, weight: Tensor) -> DenseWeight:
        return DenseWeight(weight)

    def linear(self, x: Tensor, weight: PackedWeight, *, relu2: bool = False) -> Tensor:
        assert isinstance(weight, DenseWeight)
        out = x.new_empty(x.shape[0], weight.out_features)
        for t, row in enumerate(x):
            out[t] = matvec(weight.weight, row)
        return _relu2(out) if relu2 else out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def gated_group_rms_norm(self, y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        gated = y * silu(gate)
        per_group = gated.view(gated.shape[0], groups, gated.shape[1] // groups)
        normed = per_group / torch.sqrt((per_group * per_group).mean(-1, keepdim=True) + eps)
        return normed.flatten(-2) * weight

    def conv_prefill(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: PrefillRows) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for r in range(rows.num_rows):
            window = _state_before(windows, rows, r)
            for t in _tokens(rows.cu_tokens, r):
                out[t], window = conv_step(window, x[t], weight, bias)
            windows[rows.slot_out[r]] = window
        return out

    def conv_window(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: WindowRows) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for r in range(rows.num_rows):
            window = windows[rows.slot_in[r]].clone()
            for j in range(rows.width):
                t = r * rows.width + j
                out[t], window = conv_step(window, x[t], weight, bias)
                windows[rows.slots_out[r, j]] = window
        return out

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
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dt = time_step(dt, dt_bias, dt_limit)
        for r in range(rows.num_rows):
            state = _state_before(states, rows, r)
            for t in _tokens(rows.cu_tokens, r):
                out[t], state = mamba2_step(state, x[t], dt[t], b[t], c[t], a, d)
            states[rows.slot_out[r]] = state
        return out

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
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dt = time_step(dt, dt_bias, dt_limit)
        for r in range(rows.num_rows):
            state = states[rows.slot_in[r]].clone()
            for j in range(rows.width):
                t = r * rows.width + j
                out[t], state = mamba2_step(state, x[t], dt[t], b[t], c[t], a, d)
                states[rows.slots_out[r, j]] = state
        return out

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, kv_index: Tensor) -> None:
        block_tokens = cache.shape[3]
        for t, index in enumerate(kv_index.tolist()):
            block, offset = divmod(index, block_tokens)
            cache[block, 0, :, offset] = key[t]
            cache[block, 1, :, offset] = value[t]

    def paged_attention(self, query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for r in range(rows.block_table.shape[0]):
            # [blocks, 2, V, block_tokens, D] -> [2, positions, V, D]
            paged = cache[rows.block_table[r].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)
            for t in _tokens(rows.cu_tokens, r):
                keys, values = paged[:, rows.first_key : int(rows.num_keys[t])]
                out[t] = attend(query[t], keys, values, scale)
        return out

    def route(self, x: Tensor, gate: Tensor, correction_bias: Tensor, top_k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
        scores = sigmoid(self.linear(x, DenseWeight(gate)))
        # A stable sort, so that of two equal choices the lower id wins.
        ids = torch.sort(scores + correction_bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(-1, ids)
        if normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * scaling

    def pack_experts(self, up: Tensor, down: Tensor) -> DenseExperts:
        return DenseExperts(up, down)

    def experts(self, x: Tensor, packed: DenseExperts, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for t in range(x.shape[0]):
            for f, expert in enumerate(ids[t].tolist()):
                inner = _relu2(matvec(packed.up[expert], x[t]))
                out[t] += weights[t, f] * matvec(packed.down[expert], inner)
        return out


_relu2 = relu2  # ``linear`` has an argument of that name.


def _tokens(cu_tokens: Tensor, row: int) -> range:
    return range(int(cu_tokens[row]), int(cu_tokens[row + 1]))


def _state_before(pool: Tensor, rows: PrefillRows, row: int) -> Tensor:
    """A copy of what the row starts from: zeros for START, whatever its slot contains."""
    if bool(rows.has_state[row]):
        return pool[rows.slot_in[row]].clone()
    return torch.zeros_like(pool[0], memory_format=torch.contiguous_format)
