"""The MTP module at work: its KV follows the committed tokens, and it guesses the next ones.

The entry of the pair (hidden state at i-1, token i) lies at index i; index 0 stays empty and is never attended to. So after
n committed tokens the true entries [1, n) are a function of tokens [0, n) alone. To draft, the entry of the newest token,
sampled but not yet computed, is made too; it is true as well. Entries of drafts are provisional: made from MTP's own output
instead of the target's hidden state, overwritten when the target has been there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import attention_rows, kv_index
from engine.pools import Pools
from engine.runner import Model
from engine.sampling import greedy_tokens
from kernels.contract import AttentionRows

ChooseDraft = Callable[[Tensor, int, Sequence[int]], int | None]
"""(logits [V], their ``greedy_tokens`` entry, the drafts before it) -> the draft, or None for no guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """New true entries of one request, at indices [first, first + len(token_ids)), and how many drafts shall follow."""

    blocks: Sequence[int]
    """Cover the entries and the drafts' positions but the last."""
    first: int
    token_ids: Sequence[int]
    hidden: Tensor
    """[n, d]: row j is the target's hidden state at position first+j-1."""
    num_drafts: int
    """0: only the KV is wanted."""
    choose: ChooseDraft


class Drafter:
    def __init__(self, model: Model, pools: Pools) -> None:
        self._model = model
        self._pools = pools

    def follow(self, items: Sequence[Entries]) -> list[tuple[int, ...]]:
        """Write all items' entries; returns each one's drafts, at most ``num_drafts``."""
        writing = [item for item in items if item.num_drafts == 0 and len(item.token_ids) > 0]
        drafting = [item for item in items if item.num_drafts > 0]
        if writing:
            self._model.mtp_write_kv(*self._inputs(writing), self._pools)
        drafts = iter(self._draft(drafting) if drafting else ())
        return [next(drafts) if item.num_drafts > 0 else () for item in items]

    def _draft(self, items: Sequence[Entries]) -> list[tuple[int, ...]]:
        """One pass over the true entries, then one entry a step, fed with MTP's output of the step before."""
        guesses = [_Guess(item) for item in items]
        outputs, table = self._true_entries(items)
        live = guesses
        while live:
            logits = self._model.logits(outputs)
            greedy = greedy_tokens(logits).tolist()
            goes_on = [guess.add(row, token) for guess, row, token in zip(live, logits, greedy, strict=True)]
            if not all(goes_on):
                live, outputs, table = [guess for guess, on in zip(live, goes_on, strict=True) if on], outputs[goes_on], table[goes_on]
            if live:
                outputs = self._provisional_entries(live, outputs, table)
        return [tuple(guess.drafts) for guess in guesses]

    def _true_entries(self, items: Sequence[Entries]) -> tuple[Tensor, Tensor]:
        """MTP's output [R, d] at each item's last entry, and the items' block table."""
        lengths = [len(item.token_ids) for item in items]
        num_keys = [np.arange(item.first + 1, item.first + length + 1) for item, length in zip(items, lengths, strict=True)]
        attention = attention_rows(lengths, [item.blocks for item in items], num_keys, first_key=1)
        outputs = self._model.mtp_forward(*self._inputs(items), attention, self._pools)
        return outputs[attention.cu_tokens[1:] - 1], attention.block_table

    def _provisional_entries(self, guesses: Sequence[_Guess], hidden: Tensor, table: Tensor) -> Tensor:
        """hidden [R, d], MTP's last outputs -> the next ones, over one entry per guess: that of its newest draft."""
        block_tokens = self._pools.blocks.block_tokens
        indices = [guess.item.blocks[guess.index // block_tokens] * block_tokens + guess.index % block_tokens for guess in guesses]
        attention = AttentionRows(
            cu_tokens=torch.arange(len(guesses) + 1, dtype=torch.int32),
            block_table=table,
            num_keys=torch.tensor([guess.index + 1 for guess in guesses], dtype=torch.int32),
            first_key=1,
        )
        token_ids = torch.tensor([guess.drafts[-1] for guess in guesses])
        return self._model.mtp_forward(token_ids, hidden, torch.tensor(indices), attention, self._pools)

    def _inputs(self, items: Sequence[Entries]) -> tuple[Tensor, Tensor, Tensor]:
        """token_ids int64 [M], hidden [M, d], kv_index int64 [M] of all items' entries."""
        block_tokens = self._pools.blocks.block_tokens
        indices = [kv_index(item.blocks, item.first, len(item.token_ids), block_tokens) for item in items]
        token_ids = torch.tensor([token for item in items for token in item.token_ids])
        return token_ids, torch.cat([item.hidden for item in items]), torch.from_numpy(np.concatenate(indices))


class _Guess:
    """The drafts of one request while they are being made."""

    def __init__(self, item: Entries) -> None:
        self.item = item
        self.drafts: list[int] = []

    @property
    def index(self) -> int:
        """Index of the newest draft's entry."""
        return self.item.first + len(self.item.token_ids) - 1 + len(self.drafts)

    def add(self, logits: Tensor, greedy: int) -> bool:
        """Take logits [V] for the next draft; True when another one is to follow."""
        token = self.item.choose(logits, greedy, self.drafts)
        if token is not None:
            self.drafts.append(token)
        return token is not None and len(self.drafts) < self.item.num_drafts
