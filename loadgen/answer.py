"""One streamed answer, put together event by event, with the time of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """A tool call. Servers may send its arguments in pieces."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class Answer:
    """Of a chat or a completion. Times are seconds of one monotonic clock."""

    asked_at: float
    arrivals: list[float] = field(default_factory=list)
    """Of events that brought something of the model's."""
    ended_at: float = 0.0
    text: str = ""
    reasoning: str = ""
    _calls: dict[int, Call] = field(default_factory=dict)
    """By index."""
    token_ids: list[int] = field(default_factory=list)
    """Empty when the server doesn't tell them."""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    """Baton's own account of the request, if it is Baton."""

    def take(self, event: dict[str, Any], now: float) -> None:
        self.usage = event.get("usage") or self.usage
        brought = False
        for choice in event.get("choices") or ():
            brought |= self._take_choice(choice)
        if brought:
            self.arrivals.append(now)
        self.ended_at = now

    @property
    def calls(self) -> list[Call]:
        return list(self._calls.values())

    def message(self) -> dict[str, Any]:
        """For the conversation, as the server would render it again."""
        message: dict[str, Any] = {"role": "assistant", "content": _sendable(self.text)}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": _sendable(call.name), "arguments": _sendable(call.arguments)},
                }
                for call in self.calls
            ]
        return message

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Whether it has something of the model's in it."""
        delta = choice.get("delta") or {}
        text = (delta.get("content") or "") + (choice.get("text") or "")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        token_ids = choice.get("token_ids") or []
        parts = delta.get("tool_calls") or []
        for part in parts:
            self._add(part)
        self.text += text
        self.reasoning += reasoning
        self.token_ids += token_ids
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.timings = choice.get("timings") or self.timings
        return bool(text or reasoning or token_ids or parts)

    def _add(self, part: dict[str, Any]) -> None:
        """Servers that leave the index out send whole calls; some give no id."""
        index = part.get("index")
        number = len(self._calls) if index is None else index
        call, function = self._calls.setdefault(number, Call(f"call_{number}")), part.get("function") or {}
        call.call_id = part.get("id") or call.call_id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _sendable(text: str) -> str:
    """Surrogate pairs that came apart together again; halves that stand alone can't be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
