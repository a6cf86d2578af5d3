"""Random inputs of the ops, laid out as the engine lays them out: for tests, self-checks and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.contract import SINK, AttentionRows, PrefillRows, WindowRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The leading arguments of ``mamba2_scan`` and ``mamba2_update``; x, b and c are slices of one tensor, as after the conv."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor

    def tokens(self, start: int, end: int) -> ScanInputs:
        return replace(self, **{name: getattr(self, name)[start:end] for name in ("x", "dt", "b", "c")})

    def to(self, dtype: torch.dtype) -> ScanInputs:
        return ScanInputs(*(tensor.to(dtype) for tensor in self.arguments))

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.dt, self.b, self.c, self.a, self.d, self.dt_bias


def scan_inputs(num_tokens: int, shape: MambaShape, dtype: torch.dtype = torch.float32) -> ScanInputs:
    mixed = torch.randn(num_tokens, shape.channels, dtype=dtype)
    x, b, c = mixed.tensor_split([shape.inner, shape.inner + shape.groups * shape.state], dim=1)
    return ScanInputs(
        x=x.view(num_tokens, shape.heads, shape.head_dim),
        dt=torch.randn(num_tokens, shape.heads, dtype=dtype),
        b=b.view(num_tokens, shape.groups, shape.state),
        c=c.view(num_tokens, shape.groups, shape.state),
        a=-torch.empty(shape.heads, dtype=dtype).uniform_(0.1, 4.0),
        d=torch.randn(shape.heads, dtype=dtype),
        dt_bias=torch.randn(shape.heads, dtype=dtype) - 2.0,
    )


def state_pool(num_slots: int, shape: MambaShape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Windows [S, k-1, C] and states [S, H, P, N]: two views of one pool, strided over its slots."""
    history = (shape.taps - 1) * shape.channels
    pool = torch.randn(num_slots, history + shape.inner * shape.state + 3, dtype=dtype)
    windows = pool[:, :history].view(num_slots, shape.taps - 1, shape.channels)
    states = pool[:, history : history + shape.inner * shape.state].view(num_slots, shape.heads, shape.head_dim, shape.state)
    return windows, states


def kv_cache(num_blocks: int, kv_heads: int, block_tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One layer's view [B, 2, V, block_tokens, D] of blocks that hold two layers."""
    return torch.randn(num_blocks, 2, 2, kv_heads, block_tokens, head_dim, dtype=dtype)[:, 1]


def prefill_rows(lengths: list[int], has_state: list[bool] | None = None) -> PrefillRows:
    """Row r reads slot r+1 and writes it in place."""
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    return PrefillRows(
        cu_tokens=_cumulative(lengths),
        has_state=torch.tensor(has_state if has_state is not None else [True] * len(lengths)),
        slot_in=slots,
        slot_out=slots,
    )


def window_rows(num_rows: int, width: int) -> WindowRows:
    """Row r reads slot r+1; the scratch slots follow the last row's."""
    scratch = torch.arange(num_rows * width, dtype=torch.int32) + 1 + num_rows
    return WindowRows(width=width, slot_in=torch.arange(1, num_rows + 1, dtype=torch.int32), slots_out=scratch.view(num_rows, width))


def slots_needed(rows: PrefillRows | WindowRows) -> int:
    return 1 + rows.num_rows * (rows.width + 1 if isinstance(rows, WindowRows) else 1)


def attention_rows(spans: list[tuple[int, int]], block_tokens: int, first_key: int = 0) -> AttentionRows:
    """Row r holds queries [start, end) of its sequence, causal. Blocks are dealt out in random order, block 0 to nobody."""
    blocks = [-(-end // block_tokens) for _, end in spans]
    order = (torch.randperm(sum(blocks), dtype=torch.int32) + 1).tolist()
    table = torch.full((len(spans), max(blocks)), SINK, dtype=torch.int32)
    for r, count in enumerate(blocks):
        table[r, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return AttentionRows(
        cu_tokens=_cumulative([end - start for start, end in spans]),
        block_table=table,
        num_keys=torch.cat([torch.arange(start, end, dtype=torch.int32) + 1 for start, end in spans]),
        first_key=first_key,
    )


def kv_index(rows: AttentionRows, block_tokens: int) -> Tensor:
    """int64 [T]: where the keys of the rows' own tokens go, at position num_keys - 1."""
    counts = rows.cu_tokens.diff().long()
    row_of_token = torch.repeat_interleave(torch.arange(len(counts)), counts)
    position = rows.num_keys.long() - 1
    return rows.block_table[row_of_token, position // block_tokens].long() * block_tokens + position % block_tokens


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
