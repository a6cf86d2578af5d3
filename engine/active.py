"""What the engine knows of one request. Everything is kept by the request, never by a row of a batch (invariant 6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.prefix_cache.nodes import Trail
from engine.request import EngineRequest
from engine.sampling import Sampler
from engine.transaction import StateTransaction
from protocol.ids import RequestKey

STORY_LENGTH = 32


class Phase(Enum):
    WAITING = "waiting"
    """Holds no page. All its tokens, those already given out included, are to be computed (again)."""
    LANDING = "landing"
    """Holds pages that a transfer writes. In no step, and never preempted."""
    RUNNING = "running"
    """Takes part in steps. ``computed`` tokens are in its pages; its running slot is tagged so."""
    SEALED = "sealed"
    """Holds pages that a transfer may read, of a sealed or failed prefill. In no step, and never preempted."""


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveRequest:
    request: EngineRequest
    arrival: int
    """Order among all requests, kept through preemption."""
    sampler: Sampler | None
    """None for seal, which samples nothing."""
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    """Prompt and output so far."""

    blocks: list[int] = field(default_factory=list)
    state: StateTransaction | None = None
    computed: int = 0
    mtp_known: int = 1
    """MTP KV is true at indices [1, mtp_known)."""
    kv_known: int = 0
    """KV of positions before this was found in shared blocks: a chunk that replays them for the state's sake writes none."""
    drafts: tuple[int, ...] = ()
    """Guesses for the positions behind the last token, to be verified in the next step."""
    decoding: bool = False
    """False until the first output token since admission: the next decode row is a prompt tail."""
    published_blocks: int = 0
    """seal: blocks given out in ReadyEvents."""

    trail: Trail | None = None
    """The request's way through the prefix cache. None: it doesn't use the cache."""
    branches: set[int] = field(default_factory=set)
    """Where others part from it: chunks stop there, so that a state can be kept."""
    cached_tokens: int = 0
    """What the cache saved when the request was first admitted."""
    sought: bool = False
    """The cache's second tier was asked for it."""
    held_until: int | None = None
    """It began to wait for what another request computes, and does so until this step at most."""
    shared: dict[int, int] = field(default_factory=dict)
    """While it waits: by the arrival of others, how many first tokens are the same."""

    started: bool = False
    overtaken: int = 0
    """How many requests that came later were admitted while this one waited."""
    last_step: int = -1
    steps: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))
    """Last events, told when something is wrong with the request's state."""

    def __post_init__(self) -> None:
        self.tokens.extend(self.request.token_ids)

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def seals(self) -> bool:
        return self.request.origin == "seal"

    @property
    def prefill_end(self) -> int:
        """Tokens before this are computed in chunks. A local request's last known token is its tail, which samples."""
        return len(self.tokens) - (0 if self.seals else 1)

    @property
    def found_whole(self) -> bool:
        """A prefill for a peer with nothing left to compute: all of it was in the cache."""
        return self.seals and self.computed == self.prefill_end

    @property
    def useful_drafts(self) -> int:
        """A window of one token and d drafts yields up to d+1 tokens; more than are still allowed would be for nothing."""
        return 0 if self.seals else self.request.sampling.max_tokens - self.num_output - 1

    @property
    def slots(self) -> tuple[int, ...]:
        return self.state.slots if self.state is not None else ()

    def tell(self, line: str) -> None:
        self.story.append(line)

    def told(self) -> str:
        return f"{self.key} " + "; ".join(self.story)

    def forget_state(self) -> None:
        """Back to the beginning of its tokens, without pages. What was given out stays given out."""
        self.blocks, self.state = [], None
        self.computed, self.mtp_known, self.kv_known, self.drafts, self.decoding = 0, 1, 0, (), False
        self.shared.clear()


def waiting_tokens(requests: Sequence[ActiveRequest]) -> int:
    """Tokens that are to be computed before these requests decode or seal."""
    return sum(max(active.prefill_end - active.computed, 0) for active in requests)
