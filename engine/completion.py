"""What the offline engine gives back: whole completions, and the pieces that they grow by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.request import EngineEvent, FailedEvent, FinishedEvent, TokensEvent
from engine.tokenizer import GrowingText
from protocol.errors import RequestFailed
from protocol.messages import TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """A stop token is the last of them."""
    text: str
    """Of the output without special tokens and without the stop token. Empty when the checkpoint has no tokenizer."""
    finish_reason: FinishReason
    stop_token_id: int | None
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token, None when they were not asked for."""
    steps: int
    """Steps that it took part in."""
    proposed_drafts: int
    accepted_drafts: int
    cached_tokens: int = field(compare=False)
    """Of the prompt: the prefix cache had them. The same completion, whether it did or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to one completion."""

    index: int
    """Of the prompt among those given."""
    token_ids: tuple[int, ...]
    text: str
    """What these tokens complete: empty while a character is unfinished, and for special tokens."""
    logprobs: tuple[TokenLogprob, ...] | None
    completion: Completion | None = None
    """The whole, with the last piece."""


class GrowingCompletion:
    """One completion on its way: events of its request in, pieces out."""

    def __init__(self, index: int, prompt: tuple[int, ...], text: GrowingText | None) -> None:
        self._index, self._prompt, self._text = index, prompt, text
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def grow(self, events: Sequence[EngineEvent]) -> Piece | None:
        """Take the events of one step. None when they add no token. Raises RequestFailed."""
        tokens, finished = None, None
        for event in events:
            match event:
                case TokensEvent():
                    tokens = event
                case FinishedEvent():
                    finished = event
                case FailedEvent():
                    raise RequestFailed(f"prompts[{self._index}]: {event.message}")
        assert tokens is not None or finished is None, "an ending comes with the token that caused it"
        return self._piece(tokens, finished) if tokens is not None else None

    def _piece(self, tokens: TokensEvent, finished: FinishedEvent | None) -> Piece:
        stopped = finished is not None and finished.reason == "stop"
        text = self._text.push(tokens.token_ids[:-1] if stopped else tokens.token_ids) if self._text is not None else ""
        self._token_ids.extend(tokens.token_ids)
        self._texts.append(text)
        self._logprobs.extend(tokens.logprobs or ())
        completion = self._completion(finished, tokens.logprobs is not None) if finished is not None else None
        return Piece(index=self._index, token_ids=tokens.token_ids, text=text, logprobs=tokens.logprobs, completion=completion)

    def _completion(self, finished: FinishedEvent, with_logprobs: bool) -> Completion:
        return Completion(
            prompt_token_ids=self._prompt,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            finish_reason=finished.reason,
            stop_token_id=finished.stop_token_id,
            logprobs=tuple(self._logprobs) if with_logprobs else None,
            steps=finished.steps,
            proposed_drafts=finished.proposed_drafts,
            accepted_drafts=finished.accepted_drafts,
            cached_tokens=finished.cached_tokens,
        )
