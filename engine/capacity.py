"""How large the pools are. 'None' in the settings becomes a number here, once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from engine.config import EngineConfig
from engine.models.dims import ModelDims
from engine.models.info import ModelInfo
from engine.pools import block_parts, slot_parts
from engine.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    num_blocks: int
    """The sink block included."""
    num_slots: int
    """The sink slot included."""
    max_model_len: int
    """Bound for prompt + output of one request."""
    snapshot_slots: int
    """Most slots that the prefix cache keeps."""


def plan_capacity(config: EngineConfig, dims: ModelDims, info: ModelInfo) -> Capacity:
    """Raises ValueError that names the setting which can't be met."""
    if config.speculation > 0 and not info.has_mtp:
        raise ValueError(f"speculation={config.speculation} needs a checkpoint with an MTP module, loaded (mtp is not false)")
    max_model_len = config.max_model_len or info.max_model_len
    if max_model_len > info.max_model_len:
        raise ValueError(f"max_model_len={max_model_len} is more than the checkpoint's max_position_embeddings ({info.max_model_len})")
    snapshot_slots = _snapshot_slots(config, dims, info)
    num_slots = config.state_slots or config.max_running * (config.speculation + 2) + 1 + snapshot_slots
    if num_slots < config.speculation + 3:
        raise ValueError(
            f"state_slots={num_slots} has no room for one request: speculation={config.speculation} needs {config.speculation + 3}"
        )
    return Capacity(
        num_blocks=_num_blocks(config, dims, info, max_model_len),
        num_slots=num_slots,
        max_model_len=max_model_len,
        snapshot_slots=snapshot_slots,
    )


def _snapshot_slots(config: EngineConfig, dims: ModelDims, info: ModelInfo) -> int:
    if not config.prefix_cache:
        return 0
    if config.snapshot_slots is not None:
        return config.snapshot_slots
    slot_bytes = sum(prod(part.shape) for part in slot_parts(dims, torch.float32)) * torch_dtype(info.dtype).itemsize
    return min(8 * config.max_running, config.snapshot_bytes // slot_bytes)


def _num_blocks(config: EngineConfig, dims: ModelDims, info: ModelInfo, max_model_len: int) -> int:
    if config.kv_blocks is not None:
        return config.kv_blocks
    block_bytes = sum(prod(part.shape) for part in block_parts(dims, config.block_tokens, torch.float32)) * torch_dtype(info.dtype).itemsize
    wanted = config.max_running * -(-max_model_len // config.block_tokens) + 1
    affordable = config.kv_bytes // block_bytes if block_bytes else wanted
    if affordable < 2:
        raise ValueError(f"kv_bytes={config.kv_bytes} is less than two blocks of {block_bytes} bytes")
    return min(wanted, affordable)


def check_request(request: EngineRequest, vocab_size: int, capacity: Capacity, block_tokens: int) -> None:
    """Raises ValueError, with the numbers, for a request that can never run with this capacity."""
    num_prompt = len(request.token_ids)
    if num_prompt == 0:
        raise ValueError("the prompt has no token")
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
        raise ValueError(f"the prompt has a token outside the vocabulary 0..{vocab_size - 1}")
    max_output = 0 if request.origin == "seal" else request.sampling.max_tokens
    wanted = f"{num_prompt} prompt + {max_output} output tokens"
    if num_prompt + max_output > capacity.max_model_len:
        raise ValueError(f"{wanted} exceed max_model_len={capacity.max_model_len}")
    num_blocks = -(-(num_prompt + max(max_output - 1, 0)) // block_tokens)  # the last output token is never computed
    if num_blocks > capacity.num_blocks - 1:
        raise ValueError(f"{wanted} need {num_blocks} KV blocks, the pool has {capacity.num_blocks - 1}")


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[name]
