"""Figures from turns and sessions. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadgen.record import Session, Turn

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None: there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(sum(ordered) / len(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1])

    def times(self, factor: float) -> Spread:
        return Spread(self.mean * factor, self.p50 * factor, self.p99 * factor, self.max * factor)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them don't exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % band of a success rate (Wilson's score interval)."""
    if not trials:
        return 0.0, 1.0
    rate, square = successes / trials, Z95**2
    middle = (rate + square / (2 * trials)) / (1 + square / trials)
    half = Z95 / (1 + square / trials) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def ttft_s(turns: Iterable[Turn]) -> Spread | None:
    return Spread.of(turn.ttft_s for turn in turns if turn.ttft_s is not None)


def inter_token_s(turns: Iterable[Turn]) -> Spread | None:
    """Between events that brought tokens: the pauses that a reader sees. With speculation an event brings several."""
    return Spread.of(gap for turn in turns for gap in turn.gaps_s)


def per_token_s(turns: Iterable[Turn]) -> Spread | None:
    """Mean time per token of each answer, after its first event."""
    return Spread.of(value for turn in turns if (value := turn.per_token_s) is not None)


def tokens_per_step(turns: Iterable[Turn]) -> float | None:
    """Over all turns that drafted, without their first steps: 1 + K at best. None: there are none."""
    drafted = [turn for turn in turns if turn.tokens_per_step is not None]
    steps = sum(turn.steps - 1 for turn in drafted)
    return sum(turn.completion_tokens - 1 for turn in drafted) / steps if steps else None


def meets(turn: Turn, slo_ttft_s: float | None, slo_itl_s: float | None) -> bool:
    """Whole, its first token in time, and its time per token on average."""
    if turn.failure is not None or turn.ttft_s is None:
        return False
    in_time = slo_ttft_s is None or turn.ttft_s <= slo_ttft_s
    return in_time and (slo_itl_s is None or (turn.per_token_s or 0.0) <= slo_itl_s)


def count_symptoms(turns: Iterable[Turn]) -> Counter[str]:
    return Counter(symptom for turn in turns for symptom in turn.symptoms)


def count_failures(turns: Iterable[Turn]) -> Counter[str]:
    return Counter(turn.failure for turn in turns if turn.failure)


def resolved_by_kind(sessions: Iterable[Session]) -> dict[str, tuple[int, int]]:
    """Resolved and all, by kind of bug."""
    known = [session for session in sessions if session.resolved is not None]
    kinds = sorted({session.kind for session in known})
    return {
        kind: (sum(bool(session.resolved) for session in known if session.kind == kind), sum(session.kind == kind for session in known))
        for kind in kinds
    }
