"""One request's part of the next step, from the plan to the row that runs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.active import ActiveRequest
from engine.rows import Row, RowKind


@dataclass(frozen=True, slots=True)
class Planned:
    """``count`` real tokens from ``active.computed`` on."""

    active: ActiveRequest
    kind: RowKind
    count: int

    def begin(self) -> Row:
        """Open the request's transaction. Raises StateAuditError when its slot doesn't hold what the row builds on."""
        return self._begin_window() if self.kind is RowKind.VERIFY else self._begin_prefill()

    def _begin_window(self) -> Row:
        active, first = self.active, self.active.computed
        assert active.state is not None
        token_ids = [active.tokens[first], *active.drafts]
        slot_in, slots_out = active.state.begin_window(first, self.count)
        return Row(
            kind=self.kind, first=first, token_ids=token_ids, blocks=active.blocks, slot_in=slot_in, slots_out=slots_out, samples=True
        )

    def _begin_prefill(self) -> Row:
        active, first = self.active, self.active.computed
        assert active.state is not None
        end = first + self.count
        slot_in, slot_out = active.state.begin_prefill(first, self.count, has_state=self.kind is RowKind.EXTEND)
        return Row(
            kind=self.kind,
            first=first,
            token_ids=active.tokens[first:end],
            blocks=active.blocks,
            slot_in=slot_in,
            slots_out=(slot_out,),
            kv_known=active.kv_known,
            samples=end == len(active.tokens) and not active.seals,
        )


def plan_tail(active: ActiveRequest, *, padded: bool) -> Planned:
    """A prompt's last token, which has prior state. Padded to a window it is a VERIFY row with one real token."""
    return Planned(active, RowKind.VERIFY if padded else RowKind.EXTEND, 1)
