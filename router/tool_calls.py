"""Tool calls in a model's text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, while the text is still coming."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str
    """JSON, as the API wants it."""


class ToolCallParser:
    """Text outside calls is passed on at once, except what may be the beginning of one. Markup that is no call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._after_call = False
        """Nothing but space since the last call."""
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text to show and the calls that are complete. Space around calls isn't shown."""
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._step(shown, calls):
            pass
        if not self._inside:
            end = len(self._held) - _num_begun(self._held)
            end = len(self._held[:end].rstrip())
            self._show(shown, self._held[:end])
            self._held = self._held[end:]
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """At the end of the text. A call that was never closed counts if it is whole."""
        held, self._held = self._held, ""
        shown: list[str] = []
        if not self._inside:
            self._show(shown, held)
            return "".join(shown), []
        self._inside = False
        call = self._parse(held)
        return ("", [call]) if call else (OPEN + held, [])

    def _step(self, shown: list[str], calls: list[ToolCall]) -> bool:
        """One mark further; False: the next one isn't there yet."""
        before, found, after = self._held.partition(CLOSE if self._inside else OPEN)
        if not found:
            return False
        if not self._inside:
            self._show(shown, before.rstrip())
        elif (call := self._parse(before)) is not None:
            calls.append(call)
            self._after_call = True
        else:
            self._show(shown, OPEN + before + CLOSE)
        self._held, self._inside = after, not self._inside
        return True

    def _show(self, shown: list[str], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        shown.append(text)

    def _parse(self, content: str) -> ToolCall | None:
        try:
            value = json.loads(content)
        except ValueError:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        self.num_calls += 1
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], as_text)


def _num_begun(text: str) -> int:
    """Length of the longest end of ``text`` that may become a mark."""
    return next((length for length in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-length:])), 0)
