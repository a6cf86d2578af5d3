"""The real scheduler, planner, transactions and prefix cache, without a model: a slot's content is the position it holds.

The runner writes where the rows say, so it mirrors where a kernel leaves its states. What a slot truly holds can then be read from
it, whatever its tag or the cache claims. Steps cost next to nothing: schedules can be many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import EngineCore, LoadedModel
from engine.drafter import Drafter, Entries
from engine.models.dims import ModelDims
from engine.models.info import ModelInfo
from engine.policies import OURS, Policies
from engine.pools import Pools
from engine.rows import Row, RowKind
from engine.runner import RowOutput, Runner

VOCAB = 8
MAX_LEN = 16_384
WRONG_DRAFT_EVERY = 5
_NOTHING = torch.zeros(MAX_LEN, 1)
_INFO = ModelInfo(
    model_type="positions", config_digest="", weights_digest="", vocab_size=VOCAB, max_model_len=MAX_LEN, eos_token_ids=(), has_mtp=True,
    dtype="float32",
)  # fmt: skip


class _NoModel:
    dims = ModelDims(
        hidden=1, vocab=VOCAB, max_position=MAX_LEN, num_attention_layers=0, num_mtp_attention_layers=1, attention_heads=1, kv_heads=1,
        head_dim=1, num_recurrent_layers=1, ssm_heads=1, ssm_head_dim=1, ssm_state=1, ssm_groups=1, conv_kernel=2, conv_pieces=(1, 1, 1),
    )  # fmt: skip

    def _nothing(self, *_: object) -> NoReturn:
        raise AssertionError("there is no model")

    forward = logits = mtp_write_kv = mtp_forward = _nothing


def _token(position: int) -> int:
    """The greedy token after ``position`` tokens."""
    return position * 2_654_435_761 % 2**32 >> 29


class _PositionRunner(Runner):
    def __init__(self, pools: Pools) -> None:
        self._held = pools.slots.tensor.numpy()

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        return [self._run(row) for row in rows]

    def _run(self, row: Row) -> RowOutput:
        base = 0 if row.kind is RowKind.START else int(self._held[row.slot_in, 0])
        if row.kind.is_window:
            for offset, slot in enumerate(row.slots_out, start=1):
                self._held[slot] = base + offset
        else:
            self._held[row.slots_out[0]] = base + len(row.token_ids)
        greedy = [_token(base + offset + 1) for offset in row.logits_at]
        count = len(row.token_ids)
        return RowOutput(tail=_NOTHING[0], hidden=_NOTHING[:count], logits=_NOTHING[: len(greedy)], greedy=greedy)


class _PositionDrafter(Drafter):
    """Right, but for every fifth position."""

    def __init__(self) -> None:
        pass

    def follow(self, items: Sequence[Entries]) -> list[tuple[int, ...]]:
        return [self._guess(item.first + len(item.token_ids), item.num_drafts) for item in items]

    def _guess(self, known: int, count: int) -> tuple[int, ...]:
        """Of the tokens behind the ``known`` ones."""
        return tuple(_token(p) if p % WRONG_DRAFT_EVERY else (_token(p) + 1) % VOCAB for p in range(known, known + count))


class ModelFreeCore(EngineCore):
    def __init__(self, policies: Policies = OURS, **config: Any) -> None:
        merged: dict[str, Any] = {"model": Path("none"), "kernels": "torch", "speculation": 3, "max_model_len": MAX_LEN} | config
        super().__init__(EngineConfig(**merged), LoadedModel(_NoModel(), _INFO), policies)
        self._stepper.runner = _PositionRunner(self.pools)
        self._stepper.drafter = _PositionDrafter()
        self._held = self.pools.slots.tensor.numpy()

    def held(self, slot: int) -> int | None:
        """The position that the slot truly holds; None when its parts disagree."""
        first = self._held[slot, 0]
        return int(first) if np.all(self._held[slot] == first) else None

    def receive(self, slot: int, position: int) -> None:
        """As a peer's hand-off would write it."""
        self._held[slot] = position
