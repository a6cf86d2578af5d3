"""Two reports of the same load: resolved alike, and token by token the same?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

NOT_THE_LOAD = frozenset(("local", "url", "model", "owned_by", "arrival", "rate", "concurrency", "retries"))
"""Settings on which the right answers don't depend; all others say what was asked."""


class Turn(BaseModel):
    token_ids: list[int] | None = None
    failure: Any = None
    """None: it was answered."""


class Session(BaseModel):
    name: str
    resolved: bool | None = None
    turns: list[Turn]

    def answers(self) -> list[list[int]]:
        return [turn.token_ids or [] for turn in self.turns if not turn.failure]


SESSIONS = TypeAdapter(list[Session])


@dataclass(frozen=True, slots=True)
class Comparison:
    sessions: int
    """That are in either; turns and tokens are the first report's."""
    turns: int
    tokens: int
    differences: tuple[str, ...]
    """In words: of each session that isn't the same, the first one."""


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Comparison:
    """Tries that failed are left out. Raises ValueError for what is no report, or one without token ids (``--tokens``), or of another
    load."""
    if found := _other_load(_load_of(one), _load_of(other)):
        raise ValueError(f"these aren't reports of the same load: {found}")
    first, second = _by_name(one), _by_name(other)
    answers = [answer for session in first.values() for answer in session.answers()]
    if not first.keys() & second.keys():
        raise ValueError("no session is in both reports")
    return Comparison(
        sessions=len(first.keys() | second.keys()),
        turns=len(answers),
        tokens=sum(map(len, answers)),
        differences=tuple(_differences(first, second)),
    )


def _load_of(report: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: report[key] for key in ("load", "sessions_asked") if key in report}
    return told | {key: value for key, value in report.get("settings", {}).items() if key not in NOT_THE_LOAD}


def _other_load(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for key in {**one, **other}:
        if (ours := one.get(key)) != (theirs := other.get(key)):
            return f"{key} is {ours!r} in one and {theirs!r} in the other"
    return None


def _by_name(report: Mapping[str, Any]) -> dict[str, Session]:
    try:
        sessions = {session.name: session for session in SESSIONS.validate_python(report.get("sessions", ()))}
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"this is no load's report: sessions.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    turns = [turn for session in sessions.values() for turn in session.turns]
    if not sessions:
        raise ValueError("a report has no sessions")
    if any(turn.token_ids is None for turn in turns):
        raise ValueError("a report has no token ids; it must be made with --tokens")
    if not any(turn.token_ids for turn in turns):
        raise ValueError("the token ids of a report are all empty: its server doesn't tell them")
    return sessions


def _differences(first: Mapping[str, Session], second: Mapping[str, Session]) -> Iterator[str]:
    for name in sorted(first.keys() ^ second.keys()):
        yield f"session {name} is in one of them only"
    for name, session in first.items():
        if name in second and (found := _of_session(session, second[name])):
            yield f"session {name}: {found}"


def _of_session(session: Session, other: Session) -> str | None:
    if found := _of_turns(session.answers(), other.answers()):
        return found
    return None if session.resolved == other.resolved else f"resolved is {session.resolved} against {other.resolved}"


def _of_turns(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str | None:
    for number, (one, other) in enumerate(zip(ones, others, strict=False), 1):
        if found := _of_tokens(one, other):
            return f"turn {number}, {found}"
    return f"{len(ones)} turns against {len(others)}" if len(ones) != len(others) else None


def _of_tokens(ones: Sequence[int], others: Sequence[int]) -> str | None:
    for place, (one, other) in enumerate(zip(ones, others, strict=False)):
        if one != other:
            return f"token {place}: {one} against {other}"
    return f"{len(ones)} tokens against {len(others)}" if len(ones) != len(others) else None
