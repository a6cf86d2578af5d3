"""How a step's token budget is spent. Pure functions: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import ChunkPolicy, TailPadding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """The settings of ``plan_chunk``."""

    policy: ChunkPolicy
    grid: int
    """Snapshots are wanted at its multiples."""
    max_chunk: int
    """The long-prefill threshold: of a longer rest, at most this much goes in one step."""
    tail_tokens: int = 1
    """What a row behind the prefill costs: K+1."""
    backoff_tokens: int = 0
    """Above 0: the last cacheable position, that many tokens before the last grid line, is a mandatory stop. The first seed's rule,
    which a server needs whose hits must be backed off; here it is only for comparison."""

    def __post_init__(self) -> None:
        assert min(self.grid, self.max_chunk, self.tail_tokens, self.backoff_tokens + 1) >= 1, f"{self}"
        assert self.policy == "soft" or self.max_chunk >= self.grid, f"no chunk would ever reach the grid: {self}"


class PlanChunk(Protocol):
    def __call__(self, rule: ChunkRule, *, start: int, target: int, budget: int, branches: Sequence[int]) -> int:
        """See ``plan_chunk``."""


def plan_chunk(rule: ChunkRule, *, start: int, target: int, budget: int, branches: Sequence[int] = ()) -> int:
    """Tokens of the next row of a request that is computed to ``start`` and shall be computed to ``target`` in chunks.

    The one owner of a chunk's end (invariant 11). A chunk ends at the prefill's end, at a branch point or on the grid, because
    only where a chunk ends can a snapshot be taken. From an off-grid start the next grid line is a stop. A chunk that can't reach any
    such position is deferred under ``strict`` (0), and under ``soft`` runs to where it can: its tag says what it holds.
    ``soft`` also passes a line that is nearer than half a grid to an off-grid start when it reaches a farther one: the state there would
    save too little.

    Progress: with a budget of min(max_chunk, target - start) the result is positive, under ``soft`` with a budget of one.
    At ``target`` the next row is the prompt's tail or a window: all of its K+1 tokens, or 0.
    """
    assert 0 <= start <= target, f"chunk from {start} to {target}"
    if start == target:
        return rule.tail_tokens if rule.tail_tokens <= budget else 0
    reach = start + max(0, min(target - start, budget, rule.max_chunk))
    stop = min((stop for stop in _stops(rule, start, target, branches) if start < stop < target), default=target)
    if reach >= stop:
        return stop - start
    on_grid = reach // rule.grid * rule.grid
    if on_grid > start:
        return on_grid - start
    return reach - start if rule.policy == "soft" else 0


def _stops(rule: ChunkRule, start: int, target: int, branches: Sequence[int]) -> list[int]:
    """Positions that a chunk doesn't pass, but for the target."""
    stops = [*branches]
    line = (start // rule.grid + 1) * rule.grid
    if start % rule.grid > 0 and (rule.policy == "strict" or line - start >= rule.grid // 2):
        stops.append(line)
    if rule.backoff_tokens > 0:
        stops.append(target // rule.grid * rule.grid - rule.backoff_tokens)
    return stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one running request could do in the next step."""

    last_step: int
    """Number of the step that served it last; -1 for never."""
    arrival: int
    computed: int
    prefill_end: int
    """Tokens before this go in chunks."""
    branches: Sequence[int] = ()

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prefill_end


def share_budget(
    candidates: Sequence[Candidate], rule: ChunkRule, *, step_tokens: int, prefill_tokens: int | None = None, chunk: PlanChunk = plan_chunk
) -> list[int]:
    """Tokens that each candidate gets in this step, 0 for none; in sum at most ``step_tokens``.

    Who was served longest ago comes first; of equals decodes before prefills, then by arrival. One that can't be funded
    doesn't stop those behind it, and is first in the next step. The first one always gets something, so each of R running
    requests is served at least once in R steps, however long the others' prompts are. When some of them decode, all chunks
    together get at most ``prefill_tokens``: that bounds how long a step keeps a decode waiting for the next.
    """
    shares = [0] * len(candidates)
    budget = step_tokens
    chunks = step_tokens
    if prefill_tokens is not None and not all(candidate.is_prefill for candidate in candidates):
        chunks = min(prefill_tokens, step_tokens)
    for index in sorted(range(len(candidates)), key=lambda i: _turn(candidates[i])):
        one = candidates[index]
        funds = min(budget, chunks) if one.is_prefill else budget
        shares[index] = chunk(rule, start=one.computed, target=one.prefill_end, budget=funds, branches=one.branches)
        budget -= shares[index]
        chunks -= shares[index] if one.is_prefill else 0
    return shares


def _turn(candidate: Candidate) -> tuple[int, bool, int]:
    return candidate.last_step, candidate.is_prefill, candidate.arrival


def pads_tail(tail_padding: TailPadding, *, beside_speculation: bool) -> bool:
    """Whether a prompt's last token, which has prior state, gets the shape of the windows."""
    return tail_padding == "always" or (tail_padding == "auto" and beside_speculation)
