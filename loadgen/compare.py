"""Two reports of the same load: resolved alike, and token by token the same?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_THE_LOAD = frozenset(("local", "url", "model", "owned_by", "arrival", "rate", "concurrency", "retries"))
"""Settings on which the right answers don't depend; all others say what was asked."""


@dataclass(frozen=True, slots=True)
class Comparison:
    sessions: int
    """That are in either; turns and tokens are the first report's."""
    turns: int
    tokens: int
    differences: tuple[str, ...]
    """In words: of each session that isn't the same, the first one."""


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Comparison:
    """Tries that failed are left out. Raises ValueError when a report has no token ids (``--tokens``), or they are of different loads."""
    if found := _other_load(_load_of(one), _load_of(other)):
        raise ValueError(f"these aren't reports of the same load: {found}")
    first, second = _by_name(one), _by_name(other)
    turns = [turn for session in first.values() for turn in _answered(session)]
    if not first.keys() & second.keys():
        raise ValueError("no session is in both reports")
    return Comparison(
        len(first.keys() | second.keys()), len(turns), sum(len(turn["token_ids"]) for turn in turns), tuple(_differences(first, second))
    )


def _load_of(report: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: report[key] for key in ("load", "sessions_asked") if key in report}
    return told | {key: value for key, value in report.get("settings", {}).items() if key not in NOT_THE_LOAD}


def _other_load(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for key in {**one, **other}:
        if (ours := one.get(key)) != (theirs := other.get(key)):
            return f"{key} is {ours!r} in one and {theirs!r} in the other"
    return None


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


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(first.keys() ^ second.keys()):
        yield f"session {name} is in one of them only"
    for name, session in first.items():
        if name in second and (found := _of_session(session, second[name])):
            yield f"session {name}: {found}"


def _of_session(session: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    if found := _of_turns(_answered(session), _answered(other)):
        return found
    same = session["resolved"] == other["resolved"]
    return None if same else f"resolved is {session['resolved']} against {other['resolved']}"


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
