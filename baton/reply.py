"""What a terminal shows of a chat answer: text without markup, calls as calls, and one line of figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.answer import Answer, Call
from loadgen.record import Turn
from router.tool_calls import ToolCallParser

SHORTEST_S = 0.1
"""After the first token: a few tokens that arrive together are no rate."""


@dataclass(slots=True)
class Reply:
    """Feed it each event of the stream, then ``finish`` it. Calls are told apart from text even if the server left them as markup."""

    answer: Answer = field(default_factory=lambda: Answer(asked_at=time.monotonic()))
    _markup: ToolCallParser = field(default_factory=ToolCallParser)
    _in_text: list[Call] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> str:
        """The text to show now."""
        known = len(self.answer.text)
        self.answer.take(event, time.monotonic())
        text, calls = self._markup.push(self.answer.text[known:])
        self._in_text += [Call(call.call_id, call.name, call.arguments) for call in calls]
        return text

    def finish(self) -> str:
        """What was held back: the beginning of a call that never came."""
        text, calls = self._markup.flush()
        self._in_text += [Call(call.call_id, call.name, call.arguments) for call in calls]
        return text

    @property
    def calls(self) -> list[Call]:
        """All, once finished. The server waits for results of ``answer.calls`` only."""
        return self._in_text + self.answer.calls


def figures(turns: Sequence[Turn]) -> str:
    """Of one answer or of several together; what nobody has told is left out."""
    told = []
    num_tokens = sum(turn.completion_tokens for turn in turns)
    if num_tokens:
        told.append(f"{num_tokens} tokens")
    firsts = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    if firsts:
        told.append(f"first after {1000 * sum(firsts) / len(firsts):.0f} ms")
    later = [turn for turn in turns if turn.completion_tokens > 1]
    seconds = sum(sum(turn.gaps_s) for turn in later)
    if seconds >= SHORTEST_S:
        told.append(f"{sum(turn.completion_tokens - 1 for turn in later) / seconds:.1f} tokens/s")
    if proposed := sum(turn.proposed_drafts for turn in turns):
        told.append(f"{sum(turn.accepted_drafts for turn in turns)} of {proposed} drafts accepted")
    return " · ".join(told)
