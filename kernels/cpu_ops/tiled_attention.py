"""Attention over paged keys, built so that a query's bits depend on its own keys and on nothing else.

Every matrix product has a fixed shape: a tile of queries (padded, never below ``FEW_QUERIES``) by a tile of
key positions counted from position 0. Tiles that a query does not see add exact zeros, and what the tiles
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
"""Key positions of a tile, rounded down to whole blocks."""
WIDTH_MULTIPLE = 8
"""Heads are padded to this with zeros: odd widths leave edge columns that round otherwise in some rows of a product."""


def paged_attention(query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for r, (start, end) in enumerate(pairwise(rows.cu_tokens.tolist())):
        last = int(rows.num_keys[start:end].max())
        if last <= rows.first_key:
            continue
        keys, values = _gather(cache, rows.block_table[r], rows.first_key, last)
        tile = FEW_QUERIES if end - start <= FEW_QUERIES else MANY_QUERIES
        for first in range(start, end, tile):
            stop = min(first + tile, end)
            limits = rows.num_keys[first:stop]
            out[first:stop] = _attend(query[first:stop] * scale, keys, values, limits, rows.first_key, tile)
    return out


def _gather(cache: Tensor, blocks: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tiles, V, tile positions, D padded] of positions [0, last), zeros outside [first, last).

    What lies outside may be anything, NaN too, so it is not multiplied by zero but replaced.
    """
    _, _, kv_heads, block_tokens, width = cache.shape
    tile_blocks = max(1, KEY_TILE // block_tokens)
    used = blocks[: -(-last // block_tokens)].long()
    tiles = -(-used.shape[0] // tile_blocks)
    gathered = cache.new_zeros(2, tiles, kv_heads, tile_blocks, block_tokens, -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    paged = cache.index_select(0, used)
    for tile, part in enumerate(paged.split_with_sizes([tile_blocks] * (tiles - 1) + [used.shape[0] - (tiles - 1) * tile_blocks])):
        gathered[:, tile, :, : part.shape[0], :, :width] = part.permute(1, 2, 0, 3, 4)
    keys, values = by_tile = gathered.flatten(3, 4)
    by_tile[:, 0, :, :first] = 0.0
    by_tile[:, -1, :, last - (tiles - 1) * tile_blocks * block_tokens :] = 0.0
    return keys, values


def _attend(query: Tensor, keys: Tensor, values: Tensor, num_keys: Tensor, first: int, tile: int) -> Tensor:
    """query [n ≤ tile, A, D], scaled, over keys and values [tiles, V, tile positions, D padded] -> [n, A, D]."""
    num_queries, heads, width = query.shape
    _, kv_heads, tile_keys, padded_width = keys.shape
    tiles = max(1, -(-int(num_keys.max()) // tile_keys))
    keys, values = keys[:tiles], values[:tiles]
    folded = query.new_zeros(kv_heads, tile, heads // kv_heads, padded_width)
    folded[:, :num_queries, :, :width] = query.view(num_queries, kv_heads, -1, width).transpose(0, 1)
    scores = folded.view(1, kv_heads, -1, padded_width) @ keys.transpose(2, 3)
    scores = scores.view(tiles, kv_heads, tile, -1, tile_keys)[:, :, :num_queries]
    position = torch.arange(tiles * tile_keys).view(tiles, 1, 1, 1, tile_keys)
    scores = scores.masked_fill((position < first) | (position >= num_keys[:, None, None]), -torch.inf)
    top = scores.amax(dim=(0, 4), keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # finite where nothing is seen
    weights = torch.exp(scores.sub_(top))
    total = _in_order(weights.sum(-1)).clamp_(min=torch.finfo(scores.dtype).tiny)[..., None]
    if num_queries < tile:
        weights = torch.cat([weights, weights.new_zeros(tiles, kv_heads, tile - num_queries, *weights.shape[3:])], dim=2)
    mixed = _in_order(weights.view(tiles, kv_heads, -1, tile_keys) @ values)
    mixed = mixed.view(kv_heads, tile, -1, padded_width)[:, :num_queries, :, :width] / total
    return mixed.transpose(0, 1).reshape(num_queries, heads, width)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over the tiles, first to last: a running sum has one order, ``sum`` chooses its own by the length."""
    return parts.cumsum(0)[-1]
