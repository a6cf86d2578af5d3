"""Answers in the shapes of the OpenAI API. Chunks are put together from strings: one is made for every step of every sequence."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

from router.logprobs import Describe, chat_logprobs, completion_logprobs
from router.sequence import Delta, Finish, Sequence
from router.tool_calls import ToolCall, ToolCallParser

# quoted() also escapes U+2028 and its like, at which some clients would cut a line.


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the client wants to see."""

    answer_id: str
    model: str
    describe: Describe
    want_logprobs: bool = False
    want_token_ids: bool = False
    want_timings: bool = False
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    parse_tools: bool = False
    one_tool: bool = False
    """parallel_tool_calls=false: only the first call is passed on."""
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Collected:
    """A whole sequence, when it isn't streamed."""

    sequence: Sequence
    delta: Delta
    finish: Finish


class Answer(Protocol):
    def chunk(self, sequence: Sequence, delta: Delta) -> str | None:
        """An event, or None if these tokens show nothing yet."""
        ...

    def last_chunk(self, sequence: Sequence, delta: Delta, finish: Finish) -> str: ...

    def usage_chunk(self, usage: Usage) -> str: ...

    def whole(self, collected: Many[Collected], usage: Usage) -> dict[str, Any]: ...


class _Answer:
    """What the two shapes share."""

    object_name: str
    chunk_name: str

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        head = {"id": options.answer_id, "object": self.chunk_name, "created": options.created, "model": options.model}
        self._head = f"data: {json.dumps(head)[:-1]}, "
        self._tail = ', "usage": null}\n\n' if options.include_usage else "}\n\n"
        self._begun: set[int] = set()
        """Choices of which something was shown."""

    def usage_chunk(self, usage: Usage) -> str:
        return f'{self._head}"choices": [], "usage": {json.dumps(usage.as_dict())}}}\n\n'

    def _event(self, sequence: Sequence, choice: str) -> str:
        tail = self._tail
        if self._options.continuous_usage:
            usage = Usage(
                prompt_tokens=len(sequence.prompt.token_ids), completion_tokens=sequence.num_tokens, cached_tokens=sequence.cached_tokens
            )
            tail = f', "usage": {json.dumps(usage.as_dict())}}}\n\n'
        return f'{self._head}"choices": [{choice}]{tail}'

    def _ending(self, finish: Finish) -> str:
        """What only the last chunk of a choice has."""
        return "".join(f', "{key}": {json.dumps(value)}' for key, value in self._account(finish).items())

    def _account(self, finish: Finish) -> dict[str, Any]:
        timings = {"timings": finish.timings.as_dict()} if self._options.want_timings and finish.timings else {}
        return {"stop_reason": finish.stop, **timings}

    def _shows(self, delta: Delta) -> bool:
        return bool(delta.text or delta.logprobs or (self._options.want_token_ids and delta.token_ids))

    def _begin(self, sequence: Sequence) -> bool:
        """True once per choice."""
        if sequence.index in self._begun:
            return False
        self._begun.add(sequence.index)
        return True

    def _envelope(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        options = self._options
        head = {"id": options.answer_id, "object": self.object_name, "created": options.created, "model": options.model}
        return {**head, "choices": choices, "usage": usage.as_dict()}


class CompletionAnswer(_Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def chunk(self, sequence: Sequence, delta: Delta) -> str | None:
        return self._choice(sequence, delta, "null", "") if self._shows(delta) else None

    def last_chunk(self, sequence: Sequence, delta: Delta, finish: Finish) -> str:
        return self._choice(sequence, delta, quoted(finish.reason), self._ending(finish))

    def whole(self, collected: Many[Collected], usage: Usage) -> dict[str, Any]:
        return self._envelope([self._whole_choice(one) for one in collected], usage)

    def _choice(self, sequence: Sequence, delta: Delta, reason: str, extra: str) -> str:
        begins = self._begin(sequence)
        text = self._echoed(sequence) + delta.text if begins and self._options.echo else delta.text
        logprobs = json.dumps(self._logprobs(sequence, delta)) if self._options.want_logprobs else "null"
        if self._options.want_token_ids:
            extra += f', "token_ids": {json.dumps(delta.token_ids)}'
            if begins:
                extra += f', "prompt_token_ids": {json.dumps(sequence.prompt.token_ids)}'
        choice = f'{{"index": {sequence.index}, "text": {quoted(text)}, "logprobs": {logprobs}, "finish_reason": {reason}{extra}}}'
        return self._event(sequence, choice)

    def _whole_choice(self, one: Collected) -> dict[str, Any]:
        sequence, delta = one.sequence, one.delta
        choice: dict[str, Any] = {
            "index": sequence.index,
            "text": (self._echoed(sequence) if self._options.echo else "") + delta.text,
            "logprobs": self._logprobs(sequence, delta) if self._options.want_logprobs else None,
            "finish_reason": one.finish.reason,
            **self._account(one.finish),
        }
        if self._options.want_token_ids:
            choice |= {"token_ids": delta.token_ids, "prompt_token_ids": sequence.prompt.token_ids}
        return choice

    def _logprobs(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        return completion_logprobs(delta.logprobs, self._options.describe)

    def _echoed(self, sequence: Sequence) -> str:
        assert sequence.prompt.text is not None, "prompts to be echoed have text"
        return sequence.prompt.text


class ChatAnswer(_Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        self._parsers: dict[int, ToolCallParser] = {}

    def chunk(self, sequence: Sequence, delta: Delta) -> str | None:
        if not self._options.parse_tools:
            return self._choice(sequence, delta, delta.text, [], "null", "") if self._shows(delta) else None
        text, calls = self._parser(sequence).push(delta.text)
        if not (text or calls or self._shows(Delta("", delta.token_ids, delta.logprobs))):
            return None
        return self._choice(sequence, delta, text, calls, "null", "")

    def last_chunk(self, sequence: Sequence, delta: Delta, finish: Finish) -> str:
        text, calls = self._parse_last(sequence, delta)
        reason = self._reason(sequence, finish)
        return self._choice(sequence, delta, text, calls, quoted(reason), self._ending(finish))

    def whole(self, collected: Many[Collected], usage: Usage) -> dict[str, Any]:
        body = self._envelope([self._whole_choice(one) for one in collected], usage)
        if self._options.want_token_ids:
            body["prompt_token_ids"] = collected[0].sequence.prompt.token_ids
        return body

    def _choice(self, sequence: Sequence, delta: Delta, text: str, calls: list[ToolCall], reason: str, extra: str) -> str:
        begins = self._begin(sequence)
        parts = ['"role": "assistant"'] if begins else []
        if text or (begins and not calls):
            parts.append(f'"content": {quoted(text)}')
        if calls:
            parts.append(f'"tool_calls": {json.dumps(self._calls(sequence, calls, numbered=True))}')
        logprobs = json.dumps(chat_logprobs(delta.logprobs, self._options.describe)) if self._options.want_logprobs else "null"
        if self._options.want_token_ids:
            extra += f', "token_ids": {json.dumps(delta.token_ids)}'
        content = ", ".join(parts)
        choice = f'{{"index": {sequence.index}, "delta": {{{content}}}, "logprobs": {logprobs}, "finish_reason": {reason}{extra}}}'
        event = self._event(sequence, choice)
        if begins and self._options.want_token_ids:
            event = event.replace('"choices"', f'"prompt_token_ids": {json.dumps(sequence.prompt.token_ids)}, "choices"', 1)
        return event

    def _whole_choice(self, one: Collected) -> dict[str, Any]:
        sequence, options = one.sequence, self._options
        text, calls = self._parse_last(sequence, one.delta)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = self._calls(sequence, calls, numbered=False)
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": message,
            "logprobs": chat_logprobs(one.delta.logprobs, options.describe) if options.want_logprobs else None,
            "finish_reason": self._reason(sequence, one.finish),
            **self._account(one.finish),
        }
        if options.want_token_ids:
            choice["token_ids"] = one.delta.token_ids
        return choice

    # ---- tools

    def _parser(self, sequence: Sequence) -> ToolCallParser:
        return self._parsers.setdefault(sequence.index, ToolCallParser())

    def _parse_last(self, sequence: Sequence, delta: Delta) -> tuple[str, list[ToolCall]]:
        if not self._options.parse_tools:
            return delta.text, []
        parser = self._parser(sequence)
        text, calls = parser.push(delta.text)
        rest, more = parser.flush()
        return text + rest, calls + more

    def _calls(self, sequence: Sequence, calls: list[ToolCall], *, numbered: bool) -> list[dict[str, Any]]:
        first = self._parser(sequence).num_calls - len(calls)
        shown = [(first + place, call) for place, call in enumerate(calls) if not self._options.one_tool or first + place == 0]
        return [
            {
                **({"index": number} if numbered else {}),
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in shown
        ]

    def _reason(self, sequence: Sequence, finish: Finish) -> str:
        called = sequence.index in self._parsers and self._parsers[sequence.index].num_calls > 0
        return "tool_calls" if called and finish.reason == "stop" else finish.reason
