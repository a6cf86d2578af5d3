"""Runs one step on the model: rows in, hidden states and logits out, states and hidden tails in the slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from engine.batch import StepTensors, build_step
from engine.models.dims import ModelDims
from engine.models.pool_views import PoolViews
from engine.pools import Pools
from engine.rows import Row
from engine.sampling import greedy_tokens
from kernels.contract import AttentionRows


class Model(Protocol):
    """What the engine needs of a model; ``engine.models`` has them."""

    @property
    def dims(self) -> ModelDims: ...

    def forward(self, batch: StepTensors, pools: PoolViews) -> Tensor:
        """Hidden states after the final norm [T, d]; writes KV and states where the batch says."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, vocab]."""
        ...

    def mtp_write_kv(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        """MTP KV of the pairs (hidden[m], token_ids[m]), M of them."""
        ...

    def mtp_forward(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, attention: AttentionRows, pools: PoolViews) -> Tensor:
        """The same, and the MTP module's output after its final norm [M, d]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutput:
    """What a step gave for one row."""

    tail: Tensor
    """[d]: the hidden tail that came with slot_in, at position first-1. Means nothing for START."""
    hidden: Tensor
    """[real, d]: hidden states at the row's real tokens."""
    logits: Tensor
    """[len(row.logits_at), V]: of those real tokens."""
    greedy: Sequence[int]
    """The likeliest token of each row of ``logits``; see ``engine.sampling.greedy_tokens``."""


class Runner:
    def __init__(self, model: Model, pools: Pools) -> None:
        self._model = model
        self._pools = pools

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        """One step. Afterwards every slot_out holds conv windows, matrix states and hidden tail of its position.

        Tags are not written here: the transactions of the rows do that when this has returned.
        """
        batch = build_step(rows, self._pools.blocks.block_tokens)
        tails = self._pools.slots.hidden[[row.slot_in for row in rows]]  # a copy: prefill rows overwrite theirs
        hidden = self._model.forward(batch, self._pools)
        self._keep_tails(batch, hidden)
        lengths = [len(row.slots_out) if row.kind.is_window else len(row.token_ids) for row in rows]
        outputs: list[RowOutput] = []
        logits = self._logits(rows, lengths, hidden)
        greedy = greedy_tokens(logits).tolist() if len(logits) else []  # for all rows at once: what most requests want
        start = first = 0
        for row, length, tail in zip(rows, lengths, tails, strict=True):
            end, last = start + len(row.token_ids), first + len(row.logits_at)
            outputs.append(RowOutput(tail=tail, hidden=hidden[start:end], logits=logits[first:last], greedy=greedy[first:last]))
            start, first = start + length, last
        return outputs

    def _keep_tails(self, batch: StepTensors, hidden: Tensor) -> None:
        """Hidden states of the positions whose states were written go beside them."""
        if batch.prefill is not None:
            self._pools.slots.hidden[batch.prefill.slot_out] = hidden[batch.prefill.cu_tokens[1:] - 1]
        if batch.window is not None:
            self._pools.slots.hidden[batch.window.slots_out.flatten()] = hidden[batch.num_prefill_tokens :]

    def _logits(self, rows: Sequence[Row], lengths: Sequence[int], hidden: Tensor) -> Tensor:
        """[M, V]: at each row's ``logits_at``, row after row."""
        starts = accumulate(lengths, initial=0)
        wanted = [start + offset for row, start in zip(rows, starts, strict=False) for offset in row.logits_at]
        return self._model.logits(hidden[wanted]) if wanted else hidden.new_empty(0, self._model.dims.vocab)
