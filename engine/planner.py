"""How a step's token budget is spent. Pure functions: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import TailPadding


class PlanChunk(Protocol):
    def __call__(self, *, start: int, target: int, budget: int, max_chunk: int, grid: int) -> int:
        """See ``plan_chunk``."""


def plan_chunk(*, start: int, target: int, budget: int, max_chunk: int, grid: int) -> int:
    """Tokens of the next chunk of a prompt that is computed to ``start`` and shall be computed to ``target``.

    The one owner of a chunk's end (invariant 11). The final chunk may end anywhere; others prefer to end on a multiple of
    ``grid``, and a chunk that can't reach the grid runs to where it can: the tag says what it holds. So the result is
    positive whenever there is a token to compute and a budget of one, and never more than budget, max_chunk or the rest.
    """
    assert 0 <= start <= target, f"chunk from {start} to {target}"
    assert min(budget, max_chunk - 1, grid - 1) >= 0, f"budget {budget}, max_chunk {max_chunk}, grid {grid}"
    end = start + min(target - start, budget, max_chunk)
    on_grid = end // grid * grid
    return end - start if end == target or on_grid <= start else on_grid - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one running request could do in the next step."""

    last_step: int
    """Number of the step that served it last; -1 for never."""
    arrival: int
    computed: int
    prefill_end: int
    """Tokens before this go in chunks."""
    decode_tokens: int
    """What a decode row costs, when ``computed`` is at ``prefill_end``."""

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prefill_end


def share_budget(
    candidates: Sequence[Candidate], *, step_tokens: int, max_chunk: int, grid: int, chunk: PlanChunk = plan_chunk
) -> list[int]:
    """Tokens that each candidate gets in this step, 0 for none; in sum at most ``step_tokens``.

    Who was served longest ago comes first; of equals decodes before prefills, then by arrival. The first one always gets
    something, so each of R running requests is served at least once in R steps, however long the others' prompts are.
    """
    shares = [0] * len(candidates)
    budget = step_tokens
    for index in sorted(range(len(candidates)), key=lambda i: _turn(candidates[i])):
        candidate = candidates[index]
        if candidate.is_prefill:
            shares[index] = chunk(start=candidate.computed, target=candidate.prefill_end, budget=budget, max_chunk=max_chunk, grid=grid)
        elif candidate.decode_tokens <= budget:
            shares[index] = candidate.decode_tokens
        budget -= shares[index]
    return shares


def _turn(candidate: Candidate) -> tuple[int, bool, int]:
    return candidate.last_step, candidate.is_prefill, candidate.arrival


def pads_tail(tail_padding: TailPadding, *, beside_speculation: bool) -> bool:
    """Whether a prompt's last token, which has prior state, gets the shape of the windows."""
    return tail_padding == "always" or (tail_padding == "auto" and beside_speculation)
