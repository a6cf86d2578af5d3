"""The figures of a run as one JSON object. Times are milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadgen import metrics
from loadgen.record import Session, Turn
from loadgen.run import Run


@dataclass(frozen=True, slots=True)
class Slo:
    """Milliseconds; None: no bound."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


def report(run: Run, settings: Mapping[str, Any], slo: Slo, *, asked: int, interrupted: bool, with_tokens: bool) -> dict[str, Any]:
    sessions, turns = run.sessions, run.turns
    return {
        **_resolved(sessions),
        "sessions_asked": asked,
        "interrupted": interrupted,
        "duration_s": round(run.duration_s, 3),
        "requests": len(turns),
        "failures": dict(metrics.count_failures(turns)),
        "symptoms": dict(metrics.count_symptoms(turns)),
        "ttft_ms": _ms(metrics.ttft_s(turns)),
        "inter_token_ms": _ms(metrics.inter_token_s(turns)),
        "per_token_ms": _ms(metrics.per_token_s(turns)),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "completion_tokens": sum(turn.completion_tokens for turn in turns),
        "output_tokens_per_s": _per_second(sum(turn.completion_tokens for turn in turns), run.duration_s),
        "proposed_drafts": sum(turn.proposed_drafts for turn in turns),
        "accepted_drafts": sum(turn.accepted_drafts for turn in turns),
        "tokens_per_step": _rounded(metrics.tokens_per_step(turns)),
        "goodput": _goodput(turns, slo, run.duration_s),
        "settings": dict(settings),
        "sessions": [_session(session, with_tokens) for session in sorted(sessions, key=lambda one: _order(one.name))],
    }


def _resolved(sessions: Sequence[Session]) -> dict[str, Any]:
    known = [session for session in sessions if session.resolved is not None]
    if not known:
        return {"resolved": None, "instances": 0}
    resolved = sum(bool(session.resolved) for session in known)
    return {
        "resolved": resolved,
        "instances": len(known),
        "accuracy": resolved / len(known),
        "accuracy_95": metrics.wilson(resolved, len(known)),
        "by_kind": {kind: {"resolved": good, "instances": count} for kind, (good, count) in metrics.resolved_by_kind(known).items()},
    }


def _goodput(turns: Sequence[Turn], slo: Slo, duration_s: float) -> dict[str, Any] | None:
    """None: no objective was given."""
    if slo.ttft_ms is None and slo.itl_ms is None:
        return None
    bounds = [None if bound is None else bound / 1000 for bound in (slo.ttft_ms, slo.itl_ms)]
    good = sum(metrics.meets(turn, *bounds) for turn in turns)
    return {"slo": asdict(slo), "good": good, "requests": len(turns), "per_s": _per_second(good, duration_s)}


def _session(session: Session, with_tokens: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": session.name,
        "kind": session.kind,
        "resolved": session.resolved,
        "submitted": session.submitted,
        "failure": session.failure,
    }
    return entry | {"turns": [_turn(turn, with_tokens) for turn in session.turns]}


def _turn(turn: Turn, with_tokens: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "started_s": round(turn.started_s, 3),
        "ttft_ms": _rounded(turn.ttft_s and 1000 * turn.ttft_s),
        "max_gap_ms": _rounded(1000 * max(turn.gaps_s, default=0.0)),
        "total_ms": _rounded(1000 * turn.total_s),
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "completion_tokens": turn.completion_tokens,
        "tokens_per_step": _rounded(turn.tokens_per_step),
        "symptoms": list(turn.symptoms),
        "failure": turn.failure,
    }
    return entry | ({"token_ids": list(turn.token_ids)} if with_tokens else {})


def _ms(spread: metrics.Spread | None) -> dict[str, float] | None:
    return {key: round(1000 * value, 3) for key, value in asdict(spread).items()} if spread else None


def _per_second(count: int, duration_s: float) -> float:
    return round(count / duration_s, 3) if duration_s else 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)
