"""Two reports of the same instances: resolved alike, and token by token the same?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Comparison:
    sessions: int
    turns: int
    tokens: int
    difference: str | None
    """The first one, in words; None: there is none."""


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Comparison:
    """Tries that failed are left out. Raises ValueError when a report has no token ids (``--tokens``)."""
    first, second = _by_name(one), _by_name(other)
    turns = [turn for session in first.values() for turn in _answered(session)]
    return Comparison(len(first), len(turns), sum(len(turn["token_ids"]) for turn in turns), _difference(first, second))


def _answered(session: Mapping[str, Any]) -> list[Any]:
    return [turn for turn in session["turns"] if not turn.get("failure")]


def _by_name(report: Mapping[str, Any]) -> dict[str, Any]:
    sessions = {session["name"]: session for session in report.get("sessions", ())}
    if not sessions:
        raise ValueError("a report has no sessions")
    if not all("token_ids" in turn for session in sessions.values() for turn in session["turns"]):
        raise ValueError("a report has no token ids; it must be made with --tokens")
    if not any(turn["token_ids"] for session in sessions.values() for turn in session["turns"]):
        raise ValueError("the token ids of a report are all empty: its server doesn't tell them")
    return sessions


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    if missing := sorted(first.keys() ^ second.keys()):
        return f"session {missing[0]} is in one of them only"
    for name, session in first.items():
        other = second[name]
        if found := _of_turns(_answered(session), _answered(other)):
            return f"session {name}: {found}"
        if session["resolved"] != other["resolved"]:
            return f"session {name}: resolved is {session['resolved']} against {other['resolved']}"
    return None


def _of_turns(ones: Sequence[Any], others: Sequence[Any]) -> str | None:
    for number, (one, other) in enumerate(zip(ones, others, strict=False), 1):
        if found := _of_tokens(one["token_ids"], other["token_ids"]):
            return f"turn {number}, {found}"
    return f"{len(ones)} turns against {len(others)}" if len(ones) != len(others) else None


def _of_tokens(ones: Sequence[int], others: Sequence[int]) -> str | None:
    for place, (one, other) in enumerate(zip(ones, others, strict=False)):
        if one != other:
            return f"token {place}: {one} against {other}"
    return f"{len(ones)} tokens against {len(others)}" if len(ones) != len(others) else None
