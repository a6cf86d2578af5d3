"""One request's part of one step. Its kind is set by the scheduler and passed down; nobody guesses it from lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kernels.contract import SINK


class RowKind(Enum):
    START = "start"
    """From position 0 with no prior state, whatever the slot contains. Persists h after the last token."""
    EXTEND = "extend"
    """From a slot tagged with the first position. Persists h after the last token."""
    VERIFY = "verify"
    """A window: ``real`` tokens and placeholders up to the step's width. Persists nothing until the transaction commits."""
    SINK = "sink"
    """Padding of a captured batch shape: reads and writes only the sink block and the sink slot."""

    @property
    def is_window(self) -> bool:
        return self in (RowKind.VERIFY, RowKind.SINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: RowKind
    first: int
    """Position of the first token."""
    token_ids: Sequence[int]
    """The real tokens; placeholders are not among them. Empty for SINK only."""
    blocks: Sequence[int]
    """Cover the real tokens' positions."""
    slot_in: int
    """Holds h(first). Never read for START."""
    slots_out: Sequence[int]
    """START, EXTEND: the one slot that receives h after the last token. VERIFY: one slot per window position."""
    kv_known: int = 0
    """KV of positions before this is in the blocks already, and shared: the row reads it and writes none of it."""
    samples: bool
    """START, EXTEND: logits after the last token are wanted. A VERIFY row wants those of all its real tokens."""

    def __post_init__(self) -> None:
        assert (self.kind is RowKind.START) <= (self.first == 0), "START begins at position 0"
        assert (self.kind is RowKind.EXTEND) <= (self.first > 0), "EXTEND has prior state"
        assert self.kind.is_window or len(self.slots_out) == 1, "a prefill row persists one state"
        assert (self.kind is RowKind.SINK) == (len(self.token_ids) == 0), "only SINK rows have no token"
        assert self.kind is not RowKind.VERIFY or len(self.token_ids) <= len(self.slots_out), "a window has room for its real tokens"

    @property
    def logits_at(self) -> range:
        """Which of the row's real tokens need logits."""
        count = len(self.token_ids)
        return range(0 if self.kind is RowKind.VERIFY else count - int(self.samples), count)


def sink_row(width: int) -> Row:
    return Row(kind=RowKind.SINK, first=0, token_ids=(), blocks=(), slot_in=SINK, slots_out=(SINK,) * width, samples=False)
