"""What the cache did since the start. ``CacheStats.counters`` gives the counts names for metrics."""

from __future__ import annotations

from dataclasses import dataclass


class Savings:
    """The time that hits saved, an estimate: each is counted once, at what a computed token took on average until then."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._counted = 0

    def count(self, hit_tokens: int, seconds_per_token: float) -> float:
        """``hit_tokens``: all since the start. They wait as long as no token was computed. Returns the seconds since the start."""
        if seconds_per_token > 0:
            self.seconds += (hit_tokens - self._counted) * seconds_per_token
            self._counted = hit_tokens
        return self.seconds


@dataclass(slots=True, kw_only=True)
class CacheStats:
    lookups: int = 0
    """Requests that were admitted and use the cache."""
    hits: int = 0
    """Of them, those that went on from a snapshot."""
    hit_tokens: int = 0
    replay_tokens: int = 0
    """Tokens behind the snapshot whose KV was there: computed again for the state's sake, but neither stored, sent nor run through MTP."""
    waits: int = 0
    """Requests that waited for what another one computed."""
    published_blocks: int = 0
    published_snapshots: int = 0
    unworthy_snapshots: int = 0
    """Not taken, because all that are there save more."""
    refused_publishes: int = 0
    """Claims that the slot's tag contradicted."""
    refused_resumes: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0

    blocks: int = 0
    """There now, as are the following."""
    snapshots: int = 0
    kv_bytes: int = 0
    """Of blocks that the cache keeps, those that requests use as well included."""
    snapshot_bytes: int = 0

    def counters(self) -> dict[str, float]:
        return {
            "baton_cache_lookups_total": self.lookups,
            "baton_cache_hits_total": self.hits,
            "baton_cache_hit_tokens_total": self.hit_tokens,
            "baton_cache_replay_tokens_total": self.replay_tokens,
            "baton_cache_waits_total": self.waits,
            "baton_cache_published_blocks_total": self.published_blocks,
            "baton_cache_published_snapshots_total": self.published_snapshots,
            "baton_cache_unworthy_snapshots_total": self.unworthy_snapshots,
            "baton_cache_refused_publishes_total": self.refused_publishes,
            "baton_cache_refused_resumes_total": self.refused_resumes,
            "baton_cache_evicted_blocks_total": self.evicted_blocks,
            "baton_cache_evicted_snapshots_total": self.evicted_snapshots,
            "baton_cache_blocks": self.blocks,
            "baton_cache_snapshots": self.snapshots,
            "baton_cache_kv_bytes": self.kv_bytes,
            "baton_cache_snapshot_bytes": self.snapshot_bytes,
        }
