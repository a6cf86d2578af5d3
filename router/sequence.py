"""One generated sequence on its way from tokens to text. A sink of the cluster; what comes out goes to a listener."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from protocol.errors import WireError
from protocol.messages import TokenLogprob
from router.detokenizer import Detokenizer
from router.events import Ending
from router.parameters import TextRules
from router.prompts import Prompt
from router.stop_strings import StopStrings
from router.timings import Timings


class PlacedLogprob(NamedTuple):
    """A token's log-probability and where its text begins in the sequence's text."""

    logprob: TokenLogprob
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What some tokens added. ``text`` may lag behind: half characters and possible stop strings are held back."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PlacedLogprob, ...] = ()

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.text + other.text, self.token_ids + other.token_ids, self.logprobs + other.logprobs)


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str
    stop: str | int | None
    """The stop string or token that ended it."""
    timings: Timings | None = None


class Listener(Protocol):
    def on_delta(self, sequence: Sequence, delta: Delta) -> None: ...

    def on_finish(self, sequence: Sequence, delta: Delta, finish: Finish) -> None:
        """``delta`` is the last one."""
        ...

    def on_failure(self, sequence: Sequence, ending: Ending) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """The last tokens, as far as they can be known to be the last, are kept for ``on_finish``: they and the reason go out together."""

    index: int
    prompt: Prompt
    rules: TextRules
    detokenizer: Detokenizer
    listener: Listener
    num_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt: nobody computed them for this sequence."""
    _stops: StopStrings | None = field(init=False)
    _text_length: int = 0
    """Of all text that the tokens gave, shown or held."""
    _last: Delta | None = None

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.rules.stops, include=self.rules.include_stop) if self.rules.stops else None

    # ---- the sink

    def on_begin(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def on_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> bool:
        plain = self._stops is None and logprobs is None
        delta = self._take_plain(token_ids) if plain else self._take_one_by_one(token_ids, logprobs)
        matched = self._stops is not None and self._stops.matched is not None
        if matched or self.num_tokens >= self.rules.max_tokens or self._ends(token_ids[-1]):
            self._last = delta
        else:
            self.listener.on_delta(self, delta)
        return matched

    def on_end(self, ending: Ending) -> None:
        if ending.kind != "finished":
            self.listener.on_failure(self, ending)
            return
        assert ending.reason is not None
        delta = (self._last or Delta()) + Delta(self._rest())
        stop: str | int | None = self._stops.matched if self._stops else None
        finished = ending.finished
        if stop is None and finished is not None:
            stop = finished.stop_token_id
        reason = "stop" if self._stops and self._stops.matched else ending.reason
        self.listener.on_finish(self, delta, Finish(reason, stop, ending.timings))

    # ---- tokens to text

    def _ends(self, token_id: int) -> bool:
        """Of the token that came last."""
        return token_id in self.rules.ending_ids and self.num_tokens > self.rules.min_tokens

    def _take_plain(self, token_ids: tuple[int, ...]) -> Delta:
        self.num_tokens += len(token_ids)
        silent = self._ends(token_ids[-1]) and not self.rules.include_stop
        return Delta(self.detokenizer.push(token_ids[:-1] if silent else token_ids), token_ids)

    def _take_one_by_one(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> Delta:
        """Up to the token that completes a stop string; later ones are not part of the answer."""
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise WireError(f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        texts: list[str] = []
        placed: list[PlacedLogprob] = []
        num_taken = 0
        for place, token_id in enumerate(token_ids):
            if logprobs is not None:
                placed.append(PlacedLogprob(logprobs[place], self._text_length))
            texts.append(self._take_one(token_id))
            num_taken += 1
            if self._stops is not None and self._stops.matched is not None:
                break
        return Delta("".join(texts), token_ids[:num_taken], tuple(placed))

    def _take_one(self, token_id: int) -> str:
        self.num_tokens += 1
        silent = self._ends(token_id) and not self.rules.include_stop
        piece = "" if silent else self.detokenizer.push((token_id,))
        self._text_length += len(piece)
        if self._stops is None:
            return piece
        return self._stops.skip(piece) if self.num_tokens <= self.rules.min_tokens else self._stops.push(piece)

    def _rest(self) -> str:
        """What was held back, when nothing more comes. A stop string that only the last half character completes still counts."""
        if self._stops is None:
            return self.detokenizer.flush()
        if self._stops.matched is not None:
            return ""
        shown = self._stops.push(self.detokenizer.flush())
        return shown if self._stops.matched is not None else shown + self._stops.flush()
