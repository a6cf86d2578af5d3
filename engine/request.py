"""What goes into the engine core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from protocol.ids import RequestKey
from protocol.messages import TokenLogprob
from protocol.sampling import SamplingParams

Origin = Literal["local", "remote", "seal"]
"""local: this engine computes the whole prompt and decodes. remote: [0, N-1) lands from a peer, then this engine decodes.
seal: this engine computes all given tokens, seals h(N-1) for a peer and samples nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    key: RequestKey
    token_ids: tuple[int, ...]
    """The prompt [0, N); for ``seal`` the tokens [0, N-1)."""
    origin: Origin = "local"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    """Prefixes are shared among requests with the same one."""
    use_cache: bool = True
    """False: nothing is looked up for it, and nothing of it is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Pages that D reserved for a hand-off. Nobody else touches them until ``land`` or ``cancel``."""

    blocks: tuple[int, ...]
    """Block ids that cover [0, N-1), in order."""
    slot: int
    position: int
    """N-1: the tag that the slot will carry."""
    have_blocks: int = 0
    """The first ``have_blocks`` of ``blocks`` are there already, and shared: nobody may write them. The rest and the slot are to come."""
    complete: bool = False
    """All of it is there: nothing travels, ``land`` isn't called, the request runs."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody computes for this request, as far as this side knows."""
        return self.position if self.complete else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """What the prefix cache could give to a prompt now."""

    state_tokens: int
    """A request would go on at this position."""
    kv_tokens: int
    """KV is there up to this position, a multiple of block_tokens; it may be more or less than ``state_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensEvent(EngineEvent):
    index: int
    """Output tokens before these."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent(EngineEvent):
    """Terminal. All pages of the request are back."""

    reason: Literal["stop", "length"]
    stop_token_id: int | None
    steps: int
    proposed_drafts: int
    accepted_drafts: int
    cached_tokens: int = 0
    """Of the prompt: nobody computed them for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent(EngineEvent):
    """Terminal. All pages of the request are back; those of a ``seal`` request come back with ``release`` or ``cancel``."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEvent(EngineEvent):
    """The first chunk of the prompt is about to run (local and seal), or a prefill is found in the cache whole (seal)."""

    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyEvent(EngineEvent):
    """seal: blocks [first_block, first_block+len(blocks)) of the request are final and may be read by a transfer."""

    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEvent(EngineEvent):
    """seal: all is computed. Pages stay pinned until ``release(key)``; the slot is tagged ``position``."""

    position: int
    blocks: tuple[int, ...]
    """Every block of [0, position), the partly filled last one included."""
    slot: int
    cached_tokens: int = 0
