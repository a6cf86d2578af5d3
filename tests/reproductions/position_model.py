"""A model without arithmetic: the state it keeps is the number of tokens that went into it.

It stands behind the real runner, scheduler and cache, writes where the batch says, and so shows which position a slot truly
holds, whatever the slot's tag or the cache claims. A step costs next to nothing, so that schedules can be many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch import StepTensors
from engine.config import EngineConfig
from engine.core import EngineCore, LoadedModel
from engine.models.dims import ModelDims
from engine.models.info import ModelInfo
from engine.models.pool_views import PoolViews
from engine.pools import Pools
from kernels.contract import AttentionRows

VOCAB = 8
MAX_LEN = 16_384
WRONG_DRAFT_EVERY = 5


class PositionModel:
    """Hidden state after n tokens, conv window and matrix state are all n. The greedy token is a function of n alone."""

    dims = ModelDims(
        hidden=1,
        vocab=VOCAB,
        max_position=MAX_LEN,
        num_attention_layers=0,
        num_mtp_attention_layers=1,
        attention_heads=1,
        kv_heads=1,
        head_dim=1,
        num_recurrent_layers=1,
        ssm_heads=1,
        ssm_head_dim=1,
        ssm_state=1,
        ssm_groups=1,
        conv_kernel=2,
        conv_pieces=(1, 1, 1),
    )

    def forward(self, batch: StepTensors, pools: PoolViews) -> Tensor:
        states, windows = pools.ssm(0), pools.conv(0)
        hidden: list[Tensor] = []
        if batch.prefill is not None:
            rows = batch.prefill
            lengths = rows.cu_tokens.diff().tolist()
            bases = torch.where(rows.has_state, states[rows.slot_in].flatten(), 0.0)
            ends = bases + torch.tensor(lengths)
            states[rows.slot_out] = ends.view(-1, 1, 1, 1)
            windows[rows.slot_out] = ends.view(-1, 1, 1).expand(-1, 1, 3)
            hidden += [torch.arange(base + 1, base + length + 1) for base, length in zip(bases.tolist(), lengths, strict=True)]
        if batch.window is not None:
            after = states[batch.window.slot_in].flatten(1) + torch.arange(1.0, batch.window.width + 1)
            slots = batch.window.slots_out.flatten()
            states[slots] = after.view(-1, 1, 1, 1)
            windows[slots] = after.view(-1, 1, 1).expand(-1, 1, 3)
            hidden.append(after.flatten())
        return torch.cat(hidden)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, 1] -> [M, VOCAB]"""
        likely = (hidden[:, 0].long() * 2_654_435_761 >> 7) % VOCAB
        return torch.nn.functional.one_hot(likely, VOCAB).float()

    def mtp_write_kv(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        pass

    def mtp_forward(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, attention: AttentionRows, pools: PoolViews) -> Tensor:
        """The hidden state one token on, and now and then another, so that drafts are rejected too."""
        after = hidden + 1
        return torch.where(after % WRONG_DRAFT_EVERY == 0, -after, after)


def position_core(**config: Any) -> EngineCore:
    info = ModelInfo(
        model_type="positions",
        config_digest="",
        weights_digest="",
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        eos_token_ids=(),
        has_mtp=True,
        dtype="float32",
    )
    merged: dict[str, Any] = {"model": Path("positions"), "kernels": "torch", "block_tokens": 16, "speculation": 3} | config
    return EngineCore(EngineConfig(**merged), LoadedModel(PositionModel(), info))


def held_position(pools: Pools, slot: int) -> int | None:
    """The position that the slot truly holds; None when conv window, matrix state and hidden tail disagree."""
    values = set(pools.slots.tensor[slot].tolist())
    return int(values.pop()) if len(values) == 1 else None
