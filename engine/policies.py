"""The few decisions that can be exchanged from outside, so that another system's fault can be re-created without a branch of ours.

Nothing here knows a faulty policy: those live in ``tests/reproductions/``, and get in by ``--policies module:attribute`` alone.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from engine.active import ActiveRequest
from engine.config import EngineConfig
from engine.planned import Planned, plan_tail
from engine.planner import PlanChunk, plan_chunk
from engine.prefix_cache.eviction import Score, greedy_dual
from engine.prefix_cache.publishing import PublishRule, publish_reached


class PlanTail(Protocol):
    def __call__(self, active: ActiveRequest, *, padded: bool) -> Planned:
        """The row of a prompt's last token, which has prior state. ``padded``: it shall have the windows' K+1 positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    plan_chunk: PlanChunk = plan_chunk
    """Where a prompt's next chunk ends."""
    plan_tail: PlanTail = plan_tail
    """How a prompt's last token is run, and so which state is kept after it."""
    publish: PublishRule = publish_reached
    """Which states a request offers to the prefix cache after a step, and as what."""
    previous_states: bool = False
    """Keep the state before each chunk until its states are published, as ``PublishView.previous``: what a publishing rule needs that
    looks back. Ours never does."""
    enforce_tags: bool = True
    """False: the cache believes claims that its slots' tags contradict. They are counted and told all the same."""
    score: Score = greedy_dual
    """Which snapshot goes first: the one with the lowest."""


OURS = Policies()


def check_tier(config: EngineConfig, policies: Policies) -> None:
    """Raises ValueError when what the policies get wrong could outlive them: pages in files are believed by whoever starts next.

    A wrong state is truly tagged when it was computed from a believed lie, or by another plan of the tail.
    """
    if config.snapshot_dir is not None and not (policies.enforce_tags and policies.plan_tail is plan_tail):
        raise ValueError(
            f"snapshot_dir={str(config.snapshot_dir)!r} is not possible with policies that don't enforce_tags or have a plan_tail of "
            "their own: the states they get wrong would outlive them there"
        )


def load_policies(where: str | None) -> Policies:
    """Those at ``module:attribute``; None: ours. Raises ValueError that says what is wrong with ``where``."""
    if where is None:
        return OURS
    module, _, attribute = where.partition(":")
    if not module or not attribute.isidentifier():
        raise ValueError(f"policies={where!r} is not possible: it must look like module:attribute")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policies={where!r} is not possible: {error}") from None
    if not isinstance(found, Policies):
        raise ValueError(f"policies={where!r} is not possible: that is a {type(found).__name__}")
    return found
