"""What a padded prompt tail leaves behind: three ways, the lanes, from one and the same state h(N-1).

One-token decode is the truth. A window of one real token and K placeholders must leave the same bits: that is how the engine
runs a padded tail. An EXTEND over token N and K placeholders, with a tag that says N, is the fault of systems that take the
padded tail for prefill; no scheduler of ours makes such a row, so the lane is put together here from the engine's parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import PLACEHOLDER, kv_index
from engine.capacity import torch_dtype
from engine.core import LoadedModel
from engine.pools import Pools
from engine.rows import Row, RowKind
from engine.runner import RowOutput, Runner
from engine.sampling import greedy_tokens
from engine.transaction import StateTransaction

LANES = ("one-token decode", "padded, transactional", "padded, as prefill")
BLOCK_TOKENS = 16

Parts = dict[str, Tensor]
"""All that is kept of a sequence after its computed tokens, by part: the slot's, and each KV layer's at these positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    part: str
    """conv.i and ssm.i of recurrent layer i, hidden (the tail), kv.i of attention layer i, mtp_kv."""
    scale: float
    """Largest magnitude in the first lane."""
    after_tail: float
    """Largest difference from the first lane after N tokens."""
    after_next: float
    """The same after one token more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    name: str
    token_ids: tuple[int, ...]
    """Greedy output."""
    differences: tuple[PartDifference, ...]
    same: bool
    """As the first lane: every part bit for bit, and the tokens."""


@torch.inference_mode()
def probe_tail(loaded: LoadedModel, prompt: Sequence[int], *, speculation: int, max_tokens: int) -> tuple[Lane, ...]:
    """One lane for each of LANES. Raises ValueError, with the name, for arguments that leave nothing to see."""
    _check(loaded, prompt, speculation, max_tokens)
    num_positions = len(prompt) + max_tokens + speculation
    runs = [_Run(loaded, num_positions, width=speculation + 1) for _ in LANES]
    for run in runs:
        run.extend(prompt[:-1])
    one, window, prefill = runs
    one.extend(prompt[-1:])
    window.verify(prompt[-1])
    prefill.extend_padded(prompt[-1])
    after_tail = [run.parts() for run in runs]
    outputs = [[run.next_token] for run in runs]
    after_next: list[Parts] = []
    for run, output in zip(runs, outputs, strict=True):
        run.extend(output)
        after_next.append(run.parts())
        while len(output) < max_tokens:
            output.append(run.next_token)
            run.extend(output[-1:])
    return tuple(
        _lane(name, output, [(after_tail[0], tail), (after_next[0], following)], same_tokens=output == outputs[0])
        for name, output, tail, following in zip(LANES, outputs, after_tail, after_next, strict=True)
    )


def _check(loaded: LoadedModel, prompt: Sequence[int], speculation: int, max_tokens: int) -> None:
    if len(prompt) < 2:
        raise ValueError(f"the prompt has {len(prompt)} tokens; a tail with prior state needs at least 2")
    if speculation < 1:
        raise ValueError(f"speculation={speculation} pads nothing; at least 1")
    if max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens}: the first token doesn't show the state yet; at least 2")
    unknown = [token for token in prompt if not 0 <= token < loaded.info.vocab_size]
    if unknown:
        raise ValueError(f"token {unknown[0]} is outside the vocabulary of {loaded.info.vocab_size}")


def _lane(name: str, output: Sequence[int], pairs: Sequence[tuple[Parts, Parts]], *, same_tokens: bool) -> Lane:
    (truth, tail), (true_next, following) = pairs
    return Lane(
        name=name,
        token_ids=tuple(output),
        differences=tuple(
            PartDifference(
                part=part,
                scale=truth[part].abs().max().item(),
                after_tail=(tail[part] - truth[part]).abs().max().item(),
                after_next=(following[part] - true_next[part]).abs().max().item(),
            )
            for part in truth
        ),
        same=same_tokens and all(torch.equal(true[part], held[part]) for true, held in pairs for part in true),
    )


class _Run:
    """One sequence alone on pools of its own, computed row by row."""

    def __init__(self, loaded: LoadedModel, num_positions: int, width: int) -> None:
        dims = loaded.model.dims
        num_blocks = -(-num_positions // BLOCK_TOKENS)
        self._model, self._has_mtp = loaded.model, loaded.info.has_mtp
        self._pools = Pools(dims, num_blocks + 1, width + 2, BLOCK_TOKENS, torch_dtype(loaded.info.dtype))
        self._blocks = self._pools.blocks.take(num_blocks)
        running, *scratch = self._pools.slots.take(width + 1)
        self._state = StateTransaction(self._pools.slots, running, scratch)
        self._runner = Runner(loaded.model, self._pools)
        self._width = width
        self._computed = 0
        self._mtp_known = 1
        self.next_token = PLACEHOLDER
        """The likeliest one behind the computed tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        kind = RowKind.EXTEND if self._computed else RowKind.START
        slot_in, slot_out = self._state.begin_prefill(self._computed, len(tokens), has_state=kind is RowKind.EXTEND)
        self._step(kind, tokens, tokens, slot_in, (slot_out,))

    def verify(self, token: int) -> None:
        slot_in, slots_out = self._state.begin_window(self._computed, 1)
        self._step(RowKind.VERIFY, [token], [token], slot_in, slots_out)

    def extend_padded(self, token: int) -> None:
        """The fault: the transaction is told of one token, the row runs over K+1 and keeps the state after the last."""
        slot_in, slot_out = self._state.begin_prefill(self._computed, 1, has_state=True)
        padded = [token, *[PLACEHOLDER] * (self._width - 1)]
        self._step(RowKind.EXTEND, [token], padded, slot_in, (slot_out,))

    def parts(self) -> Parts:
        """Copies."""
        pools, slot, dims = self._pools, self._state.running, self._model.dims
        kv = [pools.kv(layer)[self._blocks].movedim(3, 1).flatten(0, 1)[: self._computed] for layer in range(dims.num_kv_layers)]
        parts: Parts = {}
        for layer in range(dims.num_recurrent_layers):
            parts |= {f"conv.{layer}": pools.conv(layer)[slot], f"ssm.{layer}": pools.ssm(layer)[slot]}
        parts |= {"hidden": pools.slots.hidden[slot]}
        parts |= {f"kv.{layer}": kv[layer] for layer in range(dims.num_attention_layers)}
        if self._has_mtp:
            parts |= {"mtp_kv": kv[-1][1:]}
        return {name: part.clone() for name, part in parts.items()}

    def _step(self, kind: RowKind, tokens: Sequence[int], run: Sequence[int], slot_in: int, slots_out: Sequence[int]) -> None:
        """``run`` are the row's tokens, ``tokens`` those that count afterwards."""
        row = Row(kind=kind, first=self._computed, token_ids=run, blocks=self._blocks, slot_in=slot_in, slots_out=slots_out, samples=False)
        (output,) = self._runner.run([row])
        self._state.written()
        self._computed = self._state.commit(len(tokens))
        last = output.hidden[len(tokens) - 1]
        self.next_token = int(greedy_tokens(self._model.logits(last[None])))
        if self._has_mtp:
            self._follow(row.first, tokens, output)

    def _follow(self, base: int, tokens: Sequence[int], output: RowOutput) -> None:
        """MTP's entries of the computed tokens. The entry of a row's first token needs the hidden tail that came with its slot."""
        known = tokens[self._mtp_known - base :]
        if known:
            hidden = torch.cat([output.tail[None], output.hidden])[self._mtp_known - base : len(tokens)]
            index = kv_index(self._blocks, self._mtp_known, len(known), BLOCK_TOKENS)
            self._model.mtp_write_kv(torch.tensor(known), hidden, torch.from_numpy(index), self._pools)
        self._mtp_known = max(1, base + len(tokens))
