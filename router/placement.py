"""Which workers serve a request: one pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from protocol.ids import Epoch

SLACK = 0.25
"""A decode worker that holds more of the prompt may be fuller than the emptiest one, by this share of its rows and no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    worker_id: str
    epoch: Epoch
    draining: bool
    booked_tokens: int
    """Prompt tokens that it has to compute for the router and hasn't sealed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    worker_id: str
    epoch: Epoch
    draining: bool
    reachable: bool
    """False: its connection is gone, so it is about to be lost or to come back."""
    num_running: int
    """Requests that the router placed there and that haven't ended."""
    max_running: int
    max_tokens: int
    """Longest prompt and output together that it can ever hold."""
    booked_tokens: int
    """Prompt and output tokens of those requests."""
    refused_tokens: int | None
    """It had no room for a request of this size, and nothing has ended there since."""
    paired: frozenset[Epoch]
    """Prefill workers from which it can fetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    num_prompt_tokens: int
    max_tokens: int
    """Prompt and output together."""
    local: bool
    """The decode worker computes the prompt itself."""
    tried: frozenset[Epoch] = frozenset()
    """Decode workers that answered Busy."""
    refused_pairs: frozenset[tuple[Epoch, Epoch]] = frozenset()
    """Decode and prefill workers that weren't paired after all when this request was theirs."""
    held: Mapping[Epoch, int] = field(default_factory=dict)
    """Tokens of the prompt that these workers are likely to hold in their caches; the others hold none."""


@dataclass(frozen=True, slots=True)
class Place:
    decode: Epoch
    prefill: Epoch | None
    """None: D computes the prompt."""


@dataclass(frozen=True, slots=True)
class NoPlace:
    kind: Literal["full", "nobody"]
    """full: worth waiting for. nobody: no worker could take it even if all were idle."""
    reason: str


def place(prefills: Collection[PrefillView], decodes: Collection[DecodeView], needs: Needs) -> Place | NoPlace:
    """A decode worker that has room, those first that can fetch from a prefill worker: of those that are about as empty as the emptiest,
    the one that holds most of the prompt. Then the prefill worker that has least to compute, this prompt's rest included.
    """
    able = [view for view in decodes if not view.draining and view.max_tokens >= needs.max_tokens]
    if not able:
        return NoPlace("nobody", _why_nobody(decodes, needs))
    free = [view for view in able if _fits(view, needs)]
    if not free:
        return NoPlace("full", f"all {len(able)} decode workers are full")
    usable = [] if needs.local else [view for view in prefills if not view.draining]
    decode = _fullest_of_the_empty([view for view in free if _partners(view, usable, needs)] or free, needs)
    prefill = min(_partners(decode, usable, needs), key=lambda view: (_work(view, needs), view.worker_id), default=None)
    return Place(decode.epoch, prefill.epoch if prefill else None)


def has_room(decodes: Collection[DecodeView]) -> bool:
    """A quick no for requests of any size. Yes too when no worker takes anything: then there is something to tell."""
    live = [view for view in decodes if not view.draining]
    return not live or any(view.reachable and view.num_running < view.max_running for view in live)


def _partners(decode: DecodeView, prefills: Collection[PrefillView], needs: Needs) -> list[PrefillView]:
    return [view for view in prefills if view.epoch in decode.paired and (decode.epoch, view.epoch) not in needs.refused_pairs]


def _fits(view: DecodeView, needs: Needs) -> bool:
    if not view.reachable or view.epoch in needs.tried or view.num_running >= view.max_running:
        return False
    return view.refused_tokens is None or needs.max_tokens < view.refused_tokens


def _fullest_of_the_empty(views: Collection[DecodeView], needs: Needs) -> DecodeView:
    bound = min(_load(view)[0] for view in views) + SLACK
    return min((view for view in views if _load(view)[0] <= bound), key=lambda view: (-needs.held.get(view.epoch, 0), *_load(view)))


def _load(view: DecodeView) -> tuple[float, int, str]:
    return view.num_running / view.max_running, view.booked_tokens, view.worker_id


def _work(view: PrefillView, needs: Needs) -> int:
    """Tokens to compute until this prompt is sealed."""
    return view.booked_tokens + needs.num_prompt_tokens - needs.held.get(view.epoch, 0)


def _why_nobody(decodes: Collection[DecodeView], needs: Needs) -> str:
    if not decodes:
        return "no decode worker"
    live = [view for view in decodes if not view.draining]
    if not live:
        return "all decode workers are draining"
    return f"no decode worker holds {needs.max_tokens} tokens; the largest holds {max(view.max_tokens for view in live)}"
