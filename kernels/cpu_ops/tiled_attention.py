"""Attention over paged keys, built so that a query's bits depend on its own keys and on nothing else.

Every matrix product has a fixed shape: a tile of queries (padded, never below ``FEW_QUERIES``) by a tile of
``KEY_TILE`` key positions counted from position 0. Tiles that a query does not see add exact zeros, and what the tiles
give is summed in their order. So a query comes out the same in a window of any width, at any place in it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.contract import AttentionRows

FEW_QUERIES = 8
"""Query tile for windows and short rows."""
MANY_QUERIES = 64
"""Query tile for prompt chunks."""
KEY_TILE = 128
WIDTH_MULTIPLE = 8
"""Heads are padded to this with zeros: odd widths leave edge columns that round otherwise in some rows of a product."""


def paged_attention(query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    bounds = rows.cu_tokens.tolist()
    for r, (start, end) in enumerate(pairwise(bounds)):
        num_keys = rows.num_keys[start:end]
        last = int(num_keys.max())
        if last <= rows.first_key:
            continue
        keys, values = _gather(cache, rows.block_table[r], rows.first_key, last)
        tile = FEW_QUERIES if end - start <= FEW_QUERIES else MANY_QUERIES
        for first in range(start, end, tile):
            stop = min(first + tile, end)
            out[first:stop] = _attend(query[first:stop], keys, values, rows.num_keys[first:stop], rows.first_key, scale, tile)
    return out


def _gather(cache: Tensor, blocks: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Keys and values [V, tiles, KEY_TILE, D padded] of positions [0, last), zeros outside [first, last).

    What lies outside may be anything, NaN too, so it is not multiplied by zero but replaced.
    """
    block_tokens = cache.shape[3]
    used = blocks[: -(-last // block_tokens)].long()
    paged = cache[used].permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, V, positions, D]
    tiles = -(-last // KEY_TILE)
    width = paged.shape[-1]
    padded = paged.new_zeros(*paged.shape[:2], tiles * KEY_TILE, _padded(width))
    padded[:, :, first:last, :width] = paged[:, :, first:last]
    keys, values = padded.view(*paged.shape[:2], tiles, KEY_TILE, -1)
    return keys, values


def _attend(query: Tensor, keys: Tensor, values: Tensor, num_keys: Tensor, first: int, scale: float, tile: int) -> Tensor:
    """query [n ≤ tile, A, D] over keys and values [V, tiles, KEY_TILE, D padded] -> [n, A, D]."""
    num_queries, heads, width = query.shape
    kv_heads = keys.shape[0]
    tiles = max(1, -(-int(num_keys.max()) // KEY_TILE))
    keys, values = keys[:, :tiles], values[:, :tiles]
    folded = query.new_zeros(kv_heads, tile, heads // kv_heads, keys.shape[-1])
    folded[:, :num_queries, :, :width] = query.view(num_queries, kv_heads, -1, width).transpose(0, 1)
    scores = folded.view(kv_heads, 1, -1, keys.shape[-1]).expand(-1, tiles, -1, -1) @ keys.transpose(2, 3)
    scores = scores.view(kv_heads, tiles, tile, -1, KEY_TILE)[:, :, :num_queries] * scale
    position = torch.arange(tiles * KEY_TILE).view(tiles, 1, 1, KEY_TILE)
    hidden = (position < first) | (position >= num_keys[:, None, None])
    scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=(1, 4), keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # finite where nothing is seen
    weights = torch.exp(scores.sub_(top))
    total = _in_order(weights.sum(-1)).clamp_(min=torch.finfo(scores.dtype).tiny)[..., None]
    padded = weights.new_zeros(kv_heads, tiles, tile, heads // kv_heads, KEY_TILE)
    padded[:, :, :num_queries] = weights
    mixed = _in_order(padded.view(kv_heads, tiles, -1, KEY_TILE) @ values)
    mixed = mixed.view(kv_heads, tile, heads // kv_heads, -1)[:, :num_queries, :, :width] / total
    return mixed.transpose(0, 1).reshape(num_queries, heads, width)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 1, first to last: a running sum has one order, ``sum`` chooses its own by the length."""
    return parts.cumsum(1)[:, -1]


def _padded(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
