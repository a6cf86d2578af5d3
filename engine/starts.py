"""Where a request starts: what the prefix cache has for it, and for whose prefill it waits."""

from __future__ import annotations

from collections.abc import Sequence

from engine.active import ActiveRequest
from engine.prefix_cache.cache import PrefixCache, Who
from engine.prefix_cache.leaders import MIN_GAIN, Leader, choose_wait, common_length, longest_wait
from engine.prefix_cache.nodes import NO_HIT, Hit


class Starts:
    """For a request that doesn't use the cache, or without one, all of this is nothing. ``step`` is the number of the next step."""

    def __init__(self, cache: PrefixCache | None, *, block_tokens: int, max_chunk: int) -> None:
        self._cache = cache
        self._block_tokens = block_tokens
        self._max_chunk = max_chunk

    def look(self, active: ActiveRequest, step: int) -> Hit:
        if self._cache is None or active.trail is None:
            return NO_HIT
        who = Who(active.key, step, active.told)
        if not active.sought:
            active.sought = True
            self._cache.restore(active.trail, active.tokens, active.prefill_end, who)
        return self._cache.look(active.trail, active.tokens, active.prefill_end, who)

    def pin(self, active: ActiveRequest, hit: Hit) -> None:
        """Nothing of the hit goes until the request goes on from it."""
        if self._cache is not None and active.trail is not None:
            self._cache.pin(hit, active.trail)

    def go_on_from(self, active: ActiveRequest, hit: Hit, step: int, *, lands: bool) -> None:
        """At the hit's state, in the request's own pages. KV that goes farther is read, and not written again.

        ``lands``: a peer sends the state.
        """
        if self._cache is None or active.trail is None:
            return
        self._cache.count_lookup(hit, lands=lands)
        if hit.snapshot is not None:
            self._cache.resume(hit, active.trail, active.tokens, active.blocks, active.slots[0], Who(active.key, step, active.told))
            active.tell(f"goes on from a snapshot of {hit.state_tokens}, KV is known to {hit.kv_tokens}")
        active.computed, active.kv_known = hit.state_tokens, hit.kv_tokens
        active.mtp_known = max(1, active.computed, active.kv_known)
        if not active.started:
            active.cached_tokens = active.computed
        if active.computed + MIN_GAIN <= hit.kv_tokens < active.prefill_end:
            active.branches.add(hit.kv_tokens)  # others went on differently from here

    def leads(self, active: ActiveRequest) -> bool:
        """Whether it computes a prefill that the cache will show to others."""
        computes = active.computed < active.prefill_end
        return computes and self._cache is not None and active.trail is not None and self._cache.takes_from(active.trail)

    def waits(self, active: ActiveRequest, leaders: Sequence[ActiveRequest], step: int) -> bool:
        """Whether one of ``leaders`` computes what this one needs, and will be there sooner than this one could be by itself."""
        if self._cache is None or active.trail is None:
            return False
        others = {other.arrival: other for other in leaders if other.trail is not None and other.trail.salt == active.trail.salt}
        if not others:
            return False
        cached = self.look(active, step).state_tokens
        wait = choose_wait(
            (_leader(active, other) for other in others.values() if _may_lead(other, active, cached)),
            cached=cached,
            limit=active.prefill_end,
            block_tokens=self._block_tokens,
            waits=active.held_until is not None,
        )
        if wait is None:
            return False
        if active.held_until is None:
            active.held_until = step + longest_wait(wait.position - cached, self._max_chunk)
            self._cache.count_wait()
        if step > active.held_until:
            return False
        others[wait.leader].branches.add(wait.position)
        return True


def _may_lead(other: ActiveRequest, active: ActiveRequest, cached: int) -> bool:
    """False: they part before anything that is still to be computed. One token tells it of nearly all that have little in common."""
    position = max(other.computed, cached)
    return active.tokens[position : position + 1] == other.tokens[position : position + 1]


def _leader(active: ActiveRequest, other: ActiveRequest) -> Leader:
    if other.arrival not in active.shared:
        active.shared[other.arrival] = common_length(active.tokens, other.tokens)
    return Leader(arrival=other.arrival, computed=other.computed, prefill_end=other.prefill_end, shared=active.shared[other.arrival])
