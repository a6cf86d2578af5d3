"""The cache's decisions, together: what a test may replace to see what another decision would have done."""

from __future__ import annotations

from dataclasses import dataclass

from engine.prefix_cache.eviction import Score, greedy_dual
from engine.prefix_cache.publishing import PublishRule, publish_reached


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    publish: PublishRule = publish_reached
    score: Score = greedy_dual
    enforce_tags: bool = True
    """False: a claim is believed though the slot's tag says otherwise; counted and told all the same. For showing what that does."""
