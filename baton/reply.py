"""One streamed chat answer: what to show as it comes, what to remember of it, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from router.tool_calls import ToolCallParser


@dataclass(slots=True)
class Call:
    """A function that the model wants to be called."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class Figures:
    """What is known of one answer, or of several added up. None: nobody has told."""

    num_answers: int = 1
    num_tokens: int | None = None
    first_token_s: float | None = None
    rest_s: float | None = None
    """First token to last."""
    accepted: int | None = None
    proposed: int | None = None

    @classmethod
    def total(cls, several: Sequence[Figures]) -> Figures:
        def summed(name: str) -> Any:
            known = [value for one in several if (value := getattr(one, name)) is not None]
            return sum(known) if known else None

        return cls(**{field.name: summed(field.name) for field in fields(cls)})

    def __str__(self) -> str:
        told = []
        if self.num_tokens is not None:
            told.append(f"{self.num_tokens} tokens")
        if self.first_token_s is not None:
            told.append(f"first after {1000 * self.first_token_s / self.num_answers:.0f} ms")
        if self.num_tokens is not None and self.num_tokens > self.num_answers and self.rest_s:
            told.append(f"{(self.num_tokens - self.num_answers) / self.rest_s:.1f} tokens/s")
        if self.accepted is not None and self.proposed:
            told.append(f"{self.accepted} of {self.proposed} drafts accepted")
        return " · ".join(told)


@dataclass(slots=True)
class Reply:
    """Feed it each event of the stream, then ``finish`` it. Calls are told apart from text even if the server left them as markup."""

    clock: Callable[[], float] = time.monotonic
    content: str = ""
    """As the server sent it."""
    calls: list[Call] = field(default_factory=list)
    """Whole ones, once finished."""
    finish_reason: str | None = None
    figures: Figures = field(default_factory=Figures)
    _called: dict[int, Call] = field(default_factory=dict)
    """By index: those that the server itself told as calls; their arguments may come in pieces."""
    _markup: ToolCallParser = field(default_factory=ToolCallParser)
    _asked_at: float = 0.0
    _first_at: float | None = None

    def __post_init__(self) -> None:
        self._asked_at = self.clock()

    def take(self, event: dict[str, Any]) -> str:
        """The text to show now."""
        self._count(event.get("usage") or {})
        shown = ""
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._note_drafts(choice.get("timings") or {})
            delta = choice.get("delta") or {}
            piece = delta.get("content") or ""
            self._note_time(begins=bool(piece or delta.get("tool_calls") or self.figures.num_tokens))
            for part in delta.get("tool_calls") or ():
                self._add(part)
            self.content += piece
            text, calls = self._markup.push(piece)
            self.calls += [Call(call.call_id, call.name, call.arguments) for call in calls]
            shown += text
        return shown

    def finish(self) -> str:
        """What was held back: the beginning of a call that never came."""
        text, calls = self._markup.flush()
        self.calls += [Call(call.call_id, call.name, call.arguments) for call in calls]
        self.calls += self._called.values()
        return text

    def message(self) -> dict[str, Any]:
        """For the conversation."""
        called = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._called.values()
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": called} if called else {})

    @property
    def awaited(self) -> list[Call]:
        """The calls whose results the conversation needs before it can go on."""
        return list(self._called.values())

    def _add(self, part: dict[str, Any]) -> None:
        call = self._called.setdefault(part.get("index") or 0, Call())
        function = part.get("function") or {}
        call.call_id = part.get("id") or call.call_id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""

    def _note_time(self, *, begins: bool) -> None:
        """Servers may send chunks before the first token."""
        now = self.clock()
        if self._first_at is None and begins:
            self._first_at = now
            self.figures.first_token_s = now - self._asked_at
        if self._first_at is not None:
            self.figures.rest_s = now - self._first_at

    def _count(self, usage: dict[str, Any]) -> None:
        self.figures.num_tokens = usage.get("completion_tokens", self.figures.num_tokens)

    def _note_drafts(self, timings: dict[str, Any]) -> None:
        self.figures.accepted = timings.get("accepted_drafts", self.figures.accepted)
        self.figures.proposed = timings.get("proposed_drafts", self.figures.proposed)
