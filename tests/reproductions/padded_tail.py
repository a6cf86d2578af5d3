"""The fault of report B: a padded prompt tail that is classified as prefill.

A prompt's last token has prior state h(N-1). Beside speculative rows it is padded with K placeholders, so that all rows have
K+1 positions. Here that row goes through the prefill path, which persists only the state after its last position: what the slot
holds then is the state after N tokens and K placeholders, while the tag, like a bookkeeping by columns, says N. Nothing raises;
the next token reads it.

The engine has no such path: it knows only real tokens, and a slot's tag is written from their number. So this row lies to it
once: it opens a transaction over one token and runs K+1, its placeholders given out as real. Everything else is right: the logits
at token N, its KV, the drafter's input, the batch's shape.

How much of it shows depends on what the placeholders read, which the report doesn't tell: ``STALE`` or ``ZEROS``.

    --policies tests.reproductions.padded_tail:STALE
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.active import ActiveRequest
from engine.batch import PLACEHOLDER
from engine.planned import Planned, plan_tail
from engine.policies import Policies
from engine.rows import Row, RowKind
from kernels.contract import SINK

NUM_REMEMBERED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRow(Row):
    """A prefill row whose tokens but the first are placeholders."""

    @property
    def logits_at(self) -> range:
        return range(1)


class ZeroDrafts:
    """Placeholders read the token that those of our own windows read."""

    def remember(self, active: ActiveRequest) -> None: ...

    def placeholders(self, count: int) -> list[int]:
        return [PLACEHOLDER] * count


class StaleDrafts:
    """The scheduler only counts placeholders; the worker fills them from its buffer of drafts, where a request that has none yet
    finds what another one left."""

    def __init__(self) -> None:
        self._requests: deque[ActiveRequest] = deque(maxlen=NUM_REMEMBERED)

    def remember(self, active: ActiveRequest) -> None:
        if active not in self._requests:
            self._requests.append(active)

    def placeholders(self, count: int) -> list[int]:
        """The newest tokens, drafts included, of the last request that came and has some."""
        last = next((active for active in reversed(self._requests) if active.num_output > 0), None)
        left = [*last.tokens, *last.drafts][-count:] if last is not None else []
        return [*left, *[PLACEHOLDER] * (count - len(left))]


@dataclass(frozen=True, slots=True)
class PaddedTailAsPrefill(Planned):
    buffer: ZeroDrafts | StaleDrafts

    def begin(self) -> Row:
        active, first = self.active, self.active.computed
        assert active.state is not None
        slot_in, slot_out = active.state.begin_prefill(first, self.count, has_state=True)
        _, *scratch = active.slots
        placeholders = self.buffer.placeholders(len(scratch) - 1)
        return PaddedRow(
            kind=RowKind.EXTEND,
            first=first,
            token_ids=[active.tokens[first], *placeholders],
            blocks=[*active.blocks, *(SINK for _ in placeholders)],  # their KV lands behind the token's, where later tokens overwrite it
            slot_in=slot_in,
            slots_out=(slot_out,),
            samples=True,
        )


def padded_tail_as_prefill(buffer: ZeroDrafts | StaleDrafts) -> Policies:
    def plan(active: ActiveRequest, *, padded: bool) -> Planned:
        buffer.remember(active)
        return PaddedTailAsPrefill(active, RowKind.EXTEND, 1, buffer) if padded else plan_tail(active, padded=False)

    return Policies(plan_tail=plan)


ZEROS = padded_tail_as_prefill(ZeroDrafts())
STALE = padded_tail_as_prefill(StaleDrafts())
