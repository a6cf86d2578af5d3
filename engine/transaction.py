"""Recurrent state can't be rolled back, so it is never advanced before it is known how far.

    running slot  h(base) ──read──> step ──> scratch[0]  h(base+1)
                                        ──> scratch[1]  h(base+2)      real tokens: tagged
                                        ──> scratch[2]  (a placeholder's, never tagged)
    commit(2):    scratch[1] becomes the running slot, the old running slot joins the scratch.

A window of any width and any number of accepted tokens ends in the state that an EXTEND over the same tokens would have
left, and an aborted one in the state it began with (invariant 4). Moves nothing: only which slot is which changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.pools import StatePool


@dataclass(frozen=True, slots=True)
class _Open:
    base: int
    count: int
    """Real tokens of the step."""
    outs: tuple[int, ...]
    """outs[-1] holds h(base+count) after the step; for windows outs[j] holds h(base+j+1)."""
    window: bool


class StateTransaction:
    """The slots of one request and the step that is being made on them. Belongs to the request key, never to a row.

    Order per step: ``begin_prefill`` or ``begin_window``, the model writes, ``written``, then ``commit`` or ``abort``.
    """

    def __init__(self, pool: StatePool, running: int, scratch: Sequence[int]) -> None:
        """``running`` and ``scratch`` are owned by the caller's request, who gives ``slots`` back to the pool."""
        self._pool = pool
        self._running = running
        self._scratch = list(scratch)
        self._open: _Open | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots of the request: the running one, then the scratch."""
        return (self._running, *self._scratch)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def begin_prefill(self, base: int, count: int, *, has_state: bool) -> tuple[int, int]:
        """A START (``has_state`` False) or EXTEND of ``count`` tokens, in place: (slot_in, slot_out).

        In place, because a prompt's chunk is committed whole or its request fails: until then the slot holds nothing true.
        Raises StateAuditError when prior state is claimed and the slot doesn't hold h(base).
        """
        assert self._open is None, "one step at a time"
        if has_state:
            self._pool.audit(self._running, base, "extend")
        self._pool.tags[self._running] = None
        self._open = _Open(base, count, (self._running,), window=False)
        return self._running, self._running

    def begin_window(self, base: int, real: int) -> tuple[int, tuple[int, ...]]:
        """A VERIFY of ``real`` tokens: (slot_in, slots_out), one slot per window position. Raises StateAuditError as above."""
        assert self._open is None, "one step at a time"
        assert 1 <= real <= len(self._scratch), f"{real} tokens in a window of {len(self._scratch)}"
        self._pool.audit(self._running, base, "verify")
        self._clear_scratch()
        self._open = _Open(base, real, tuple(self._scratch), window=True)
        return self._running, self._open.outs

    def written(self) -> None:
        """The model has written the states: tag them. Called by the code that ran the step."""
        step = self._require_open()
        if not step.window:
            self._pool.tags[self._running] = step.base + step.count
            return
        for offset, slot in enumerate(step.outs[: step.count], start=1):
            self._pool.tags[slot] = step.base + offset

    def commit(self, num_tokens: int) -> int:
        """Make h(base+num_tokens) the request's state; returns that position. Raises StateAuditError if it isn't what was written."""
        step = self._require_open()
        assert 1 <= num_tokens <= step.count, f"commit of {num_tokens} of {step.count} tokens"
        assert step.window or num_tokens == step.count, "a prefill row is committed whole"
        position = step.base + num_tokens
        slot = step.outs[num_tokens - 1] if step.window else self._running
        self._pool.audit(slot, position, "commit")
        self._open = None
        if step.window:
            self._scratch[num_tokens - 1], self._running = self._running, slot
            self._clear_scratch()
        return position

    def abort(self) -> None:
        """Leave a window's committed state as it was. After an aborted prefill the slot holds nothing (its tag is None)."""
        step = self._require_open()
        self._open = None
        if step.window:
            self._clear_scratch()
        else:
            self._pool.tags[self._running] = None

    def _clear_scratch(self) -> None:
        for slot in self._scratch:
            self._pool.tags[slot] = None

    def _require_open(self) -> _Open:
        assert self._open is not None, "no step was begun"
        return self._open
