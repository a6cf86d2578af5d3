"""Causal depthwise convolution over ragged rows and over windows, as shifted products of whole tensors.

Products and sums are separate torch ops, in the order of the taps, so every output is rounded the same way wherever it lies.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.contract import PrefillRows, WindowRows
from kernels.elementwise import silu


def conv_prefill(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: PrefillRows) -> Tensor:
    history = windows.shape[1]
    before = windows[rows.slot_in.long()]
    before = torch.where(rows.has_state[:, None, None], before, 0.0)
    bounds = rows.cu_tokens.tolist()
    spans = list(pairwise(bounds))
    # Row after row: its window, then its tokens. Shifts across a row's border are computed too, and dropped below.
    padded = torch.cat([piece for r, (start, end) in enumerate(spans) for piece in (before[r], x[start:end])])
    out = _shifted_sum(padded, weight, bias)
    wanted = [out[start + r * history : end + r * history] for r, (start, end) in enumerate(spans)]
    after = [padded[end + r * history : end + (r + 1) * history] for r, (_, end) in enumerate(spans)]
    windows[rows.slot_out.long()] = torch.stack(after)
    return torch.cat(wanted) if len(wanted) > 1 else wanted[0]


def conv_window(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: WindowRows) -> Tensor:
    history = windows.shape[1]
    slots_out = rows.slots_out.long()
    padded = torch.cat([windows[rows.slot_in.long()], x.view(rows.num_rows, rows.width, -1)], dim=1)
    out = _shifted_sum(padded, weight, bias)
    for j in range(rows.width):
        windows[slots_out[:, j]] = padded[:, j + 1 : j + 1 + history]
    return out.reshape(x.shape)


def _shifted_sum(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """padded [..., n + k - 1, C] -> silu(conv) [..., n, C]."""
    taps = weight.shape[1]
    length = padded.shape[-2] - (taps - 1)
    total = padded[..., :length, :] * weight[:, 0]
    for tap in range(1, taps):
        total += padded[..., tap : tap + length, :] * weight[:, tap]
    return silu(total if bias is None else total.add_(bias))
