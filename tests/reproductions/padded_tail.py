"""The fault of report B: a padded prompt tail that is classified as prefill.

A prompt's last token has prior state h(N-1). Beside speculative rows it is padded with K placeholders, so that all rows have
K+1 positions. Here that row goes through the prefill path, which persists only the state after its last position: what the slot
holds then is the state after N tokens and K placeholders, while the tag, like a bookkeeping by columns, says N. Nothing raises;
the next token reads it.

The engine has no such path: it knows only real tokens, and a slot's tag is written from their number. So this row lies to it
once: it opens a transaction over one token and runs K+1, its placeholders given out as real. Everything else is right: the logits
at token N, its KV, the drafter's input, the batch's shape.

    --policies tests.reproductions.padded_tail:POLICIES
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.active import ActiveRequest
from engine.batch import PLACEHOLDER
from engine.planned import Planned, plan_tail
from engine.policies import Policies
from engine.rows import Row, RowKind
from kernels.contract import SINK


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRow(Row):
    """A prefill row whose tokens but the first are placeholders."""

    @property
    def logits_at(self) -> range:
        return range(1)


@dataclass(frozen=True, slots=True)
class PaddedTailAsPrefill(Planned):
    def begin(self) -> Row:
        active, first = self.active, self.active.computed
        assert active.state is not None
        slot_in, slot_out = active.state.begin_prefill(first, self.count, has_state=True)
        _, *scratch = active.slots
        placeholders = [PLACEHOLDER] * (len(scratch) - 1)
        return PaddedRow(
            kind=RowKind.EXTEND,
            first=first,
            token_ids=[active.tokens[first], *placeholders],
            blocks=[*active.blocks, *(SINK for _ in placeholders)],  # their KV lands behind the token's, where later tokens overwrite it
            slot_in=slot_in,
            slots_out=(slot_out,),
            samples=True,
        )


def padded_tail_as_prefill(active: ActiveRequest, *, padded: bool) -> Planned:
    return PaddedTailAsPrefill(active, RowKind.EXTEND, 1) if padded else plan_tail(active, padded=False)


POLICIES = Policies(plan_tail=padded_tail_as_prefill)
