"""Mamba-2: token by token for windows and short rows, in chunks (SSD) for long rows.

A row of at most ``SEQUENTIAL_TOKENS`` tokens takes the steps of a window, so an EXTEND over the tokens of a window leaves
the same state, bit for bit. Longer rows take the chunked form: the products within a chunk are matrix products, and only
one state per chunk is carried. Source: Dao & Gu 2024, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.contract import PrefillRows, WindowRows
from kernels.elementwise import softplus

SEQUENTIAL_TOKENS = 8
MAX_CHUNK = 64
"""Work within a chunk grows with its square; beyond this the matrix products gain nothing more."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of rows of equal length, [..., n, ·] each."""

    x: Tensor
    """[..., n, H, P]"""
    dt: Tensor
    """[..., n, H] after softplus and clamp"""
    b: Tensor
    """[..., n, H, N], each head with its group's"""
    c: Tensor
    """[..., n, H, N]"""

    def span(self, start: int, end: int) -> Inputs:
        """Tokens [start, end) of one row."""
        return Inputs(self.x[start:end], self.dt[start:end], self.b[start:end], self.c[start:end])


def prepare(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]) -> Inputs:
    heads, groups = x.shape[1], b.shape[1]
    dt = softplus(dt + dt_bias).clamp(*dt_limit)
    group_of_head = torch.arange(heads) * groups // heads
    return Inputs(x, dt, b[:, group_of_head], c[:, group_of_head])


def scan(inputs: Inputs, a: Tensor, d: Tensor, states: Tensor, rows: PrefillRows, chunk: int) -> Tensor:
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    bounds, has_state = rows.cu_tokens.tolist(), rows.has_state.tolist()
    slots_in, slots_out = rows.slot_in.tolist(), rows.slot_out.tolist()
    for r, (start, end) in enumerate(pairwise(bounds)):
        state = states[slots_in[r]].clone() if has_state[r] else torch.zeros_like(states[0], memory_format=torch.contiguous_format)
        row = inputs.span(start, end)
        if end - start <= SEQUENTIAL_TOKENS:
            for j in range(end - start):
                out[start + j] = step(state, row.span(j, j + 1), a, d)[0]
        else:
            _scan_row(row, a, d, state, min(chunk, MAX_CHUNK), out[start:end])
        states[slots_out[r]] = state
    return out


def update(inputs: Inputs, a: Tensor, d: Tensor, states: Tensor, rows: WindowRows) -> Tensor:
    width, slots_out = rows.width, rows.slots_out.long()
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    state = states[rows.slot_in.long()]
    for j in range(width):
        position = Inputs(inputs.x[j::width], inputs.dt[j::width], inputs.b[j::width], inputs.c[j::width])
        out[j::width] = step(state, position, a, d)
        states[slots_out[:, j]] = state
    return out


def step(state: Tensor, token: Inputs, a: Tensor, d: Tensor) -> Tensor:
    """One token of each of R rows: state [R, H, P, N] is advanced in place, returns y [R, H, P].

    Products and sums stay separate ops (no addcmul), so that no fused rounding appears in some elements and not in others.
    """
    state = state.view(token.x.shape[0], *state.shape[-3:])
    state *= torch.exp(token.dt * a)[:, :, None, None]
    state += (token.dt[:, :, None] * token.x)[:, :, :, None] * token.b[:, :, None, :]
    return (state * token.c[:, :, None, :]).sum(-1) + d[:, None] * token.x


def _scan_row(row: Inputs, a: Tensor, d: Tensor, state: Tensor, chunk: int, out: Tensor) -> None:
    """One long row: ``state`` [H, P, N] is advanced in place, y goes to ``out`` [n, H, P]."""
    length = row.x.shape[0]
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        out[start:end] = _scan_chunk(row.span(start, end), a, state)
    out += d[:, None] * row.x


def _scan_chunk(tokens: Inputs, a: Tensor, state: Tensor) -> Tensor:
    """y of one chunk without the d·x term; ``state`` is advanced in place.

    With L the running sum of dt·a: y_i = e^{L_i} S c_i + Σ_{j≤i} e^{L_i-L_j} (c_i·b_j) dt_j x_j. L is kept in fp64, because
    the differences of large sums would otherwise lose the digits that matter.
    """
    log_decay = (tokens.dt.double() * a.double()).cumsum(0).T  # [H, n]
    inputs = (tokens.dt[:, :, None] * tokens.x).transpose(0, 1)  # [H, n, P]
    # Copies, because a matrix product may round otherwise when its operands lie at another alignment.
    b, c = _by_head(tokens.b), _by_head(tokens.c)  # [H, n, N]
    decay = torch.exp((log_decay[:, :, None] - log_decay[:, None, :]).float().tril_()).tril_()  # zeros before exp, never an overflow
    from_inside = (c @ b.transpose(1, 2)).mul_(decay) @ inputs
    from_before = (c @ state.transpose(1, 2)) * torch.exp(log_decay.float())[:, :, None]
    to_end = torch.exp((log_decay[:, -1:] - log_decay).float())
    state *= torch.exp(log_decay[:, -1].float())[:, None, None]
    state += (inputs * to_end[:, :, None]).transpose(1, 2) @ b
    return (from_inside + from_before).transpose(0, 1)


def _by_head(tensor: Tensor) -> Tensor:
    """[n, H, ·] -> [H, n, ·], always in memory of its own."""
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format)
