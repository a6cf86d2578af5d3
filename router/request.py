"""One request as the router carries it: what is wanted, where results go, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from protocol.ids import Epoch, RequestId
from protocol.messages import CacheUse, Finished, Timing, TokenLogprob
from protocol.sampling import SamplingParams
from router.events import Ending
from router.lifecycle import RequestLife
from router.prefixes import Chain
from router.timings import Timings


class Sink(Protocol):
    """Where one sequence's results go."""

    def on_begin(self, cached_tokens: int) -> None:
        """Tokens follow; so many of the prompt's nobody had to compute. Again, if the request is placed anew afterwards."""
        ...

    def on_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> bool:
        """True: a stop string matched, the sequence is over."""
        ...

    def on_end(self, ending: Ending) -> None: ...


@dataclass(frozen=True, slots=True)
class Order:
    """One sequence to generate."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache: CacheUse = field(default_factory=CacheUse)
    chain: Chain = ()
    """Of the prompt, for finding workers that hold its beginning."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Request:
    order: Order
    sink: Sink
    life: RequestLife
    number: int
    """In order of arrival."""
    arrived_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    timing: Timing | None = None
    """As D told it with the first token."""
    tried: frozenset[Epoch] = frozenset()
    """Busy decode workers, since the request last waited."""
    refused_pairs: frozenset[tuple[Epoch, Epoch]] = frozenset()
    """Decode and prefill workers that turned out not to be paired when this request was theirs."""

    def timings(self, finished: Finished | None, now: float) -> Timings:
        """Of a request that finishes now."""
        return Timings(
            router_s=self.admitted_at - self.arrived_at,
            parts=self.timing,
            first_token_s=self.first_token_at - self.arrived_at,
            total_s=now - self.arrived_at,
            finished=finished,
        )
