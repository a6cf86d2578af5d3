"""What is kept of a turn and of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from loadgen.answer import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request. Seconds."""

    started_s: float
    """Since the run began."""
    ttft_s: float | None
    """None: nothing came."""
    gaps_s: Sequence[float]
    """Between events that brought tokens; one event may bring several."""
    total_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    """Decode steps, where the server tells; so for drafts."""
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    token_ids: Sequence[int] = ()
    symptoms: Sequence[str] = ()
    failure: str | None = None
    """Kind of failure; the session ended with it."""

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first one."""
        return sum(self.gaps_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None

    @property
    def tokens_per_step(self) -> float | None:
        """Of the steps that had drafts, all but the first, which brings one token. None: nobody drafted, or the server doesn't tell."""
        return (self.completion_tokens - 1) / (self.steps - 1) if self.steps > 1 and self.proposed_drafts else None


@dataclass(slots=True, kw_only=True)
class Session:
    name: str
    """The seed of an instance, or the place in a file."""
    kind: str = ""
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    resolved: bool | None = None
    """None: nothing is to be resolved, or it isn't known yet."""
    submitted: bool = False

    @property
    def failure(self) -> str | None:
        return self.turns[-1].failure if self.turns else None


def turn_of(answer: Answer, began_at: float, symptoms: Sequence[str] = (), failure: str | None = None) -> Turn:
    usage, timings = answer.usage, answer.timings
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        started_s=answer.asked_at - began_at,
        ttft_s=answer.arrivals[0] - answer.asked_at if answer.arrivals else None,
        gaps_s=tuple(after - before for before, after in pairwise(answer.arrivals)),
        total_s=max(0.0, answer.ended_at - answer.asked_at),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or len(answer.token_ids),
        cached_tokens=details.get("cached_tokens") or 0,
        steps=timings.get("steps") or 0,
        proposed_drafts=timings.get("proposed_drafts") or 0,
        accepted_drafts=timings.get("accepted_drafts") or 0,
        token_ids=tuple(answer.token_ids),
        symptoms=tuple(symptoms),
        failure=failure,
    )
