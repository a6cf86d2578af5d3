"""Who is admitted, and who takes part in the next step."""

from __future__ import annotations

from collections.abc import Sequence

from engine.active import ActiveRequest, Phase
from engine.admission import MAX_OVERTAKEN, Pages, choose_admissions
from engine.composing import compose
from engine.growth import Growth
from engine.limits import Limits
from engine.planned import Planned
from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache
from engine.prefix_cache.nodes import Hit
from engine.roster import Roster
from engine.starts import Starts


class Scheduler:
    """Owns the pages of every request from admission until the roster drops it.

    A request that only waits holds nothing. What only the cache keeps counts as free: it is given up before anything else.
    """

    def __init__(self, pools: Pools, limits: Limits, policies: Policies, cache: PrefixCache | None) -> None:
        self._pools = pools
        self._limits = limits
        self._policies = policies
        self._starts = Starts(cache, block_tokens=pools.blocks.block_tokens, max_chunk=limits.chunk.max_chunk)
        self.roster = Roster(pools, limits, cache)
        self.growth = Growth(pools, self.roster, limits.speculation)
        self.steps = 0
        """How many were served."""

    # --- a peer's requests

    def reserve(self, active: ActiveRequest) -> bool:
        """Take all pages that a hand-off and the first window need, or nothing. Waiting requests have the same right to overtaking.

        When the cache has the whole of it the request runs at once; a shallower state is of no use to it.
        """
        roster, room = self.roster, self.roster.room()
        hit = self._starts.look(active, self.steps)
        hit = roster.fitting(active, hit if hit.state_tokens >= active.prefill_end else hit.without_state(), room)
        if any(other.overtaken >= MAX_OVERTAKEN for other in roster.waiting) or not roster.need(active, hit).fits(room):
            return False
        for other in roster.waiting:
            other.overtaken += 1
        lands = hit.snapshot is None
        self._take_pages(active, hit, lands=lands)
        active.phase = Phase.LANDING if lands else Phase.RUNNING
        return True

    def hold(self, active: ActiveRequest) -> None:
        """A prefill that seals has failed: it computes no more and its state is nobody's, but its pages stay until it is dropped."""
        assert active.state is not None, "only what takes part in steps can fail"
        if active.state.is_open:
            active.state.abort()
        for slot in active.slots:
            self._pools.slots.tags[slot] = None
        active.computed = 0
        active.phase = Phase.SEALED

    # --- the next step

    def plan(self) -> list[Planned]:
        """The rows of the next step, prefill rows first. Empty when nothing can run before something from outside happens.

        Asked again before ``serve``, it gives the same rows, but for what came or went meanwhile.
        """
        self.growth.grow_by_age()
        self._admit()
        ready = [active for active in self.roster.running() if not self.growth.lacks_block(active) and not active.found_whole]
        return compose(ready, self._limits, self._policies)

    def serve(self, plan: Sequence[Planned]) -> None:
        """The plan is run now: its requests had their turn."""
        for planned in plan:
            planned.active.last_step = self.steps
        self.steps += 1

    # --- admission

    def _admit(self) -> None:
        if not self.roster.waiting:
            return
        room = self.roster.room()
        if room.rows <= 0:
            return
        leaders = [active for active in self.roster.running() if self._starts.leads(active)]
        asking = [active for active in self.roster.waiting if not self._starts.waits(active, leaders, self.steps)]
        needs = [self.roster.need(active, self._hit_within(active, room)) for active in asking]
        admitted = choose_admissions(needs, [active.overtaken for active in asking], room)
        for index, active in enumerate(asking):
            active.overtaken = 0 if index in admitted else active.overtaken + sum(1 for other in admitted if other > index)
        for active, granted in ((asking[index], needs[index]) for index in admitted):
            if not self._starts.waits(active, leaders, self.steps):
                self._start(active, granted)
                leaders += [active] if self._starts.leads(active) else []

    def _start(self, active: ActiveRequest, granted: Pages) -> None:
        """Within what it was granted: those that started before it may have taken pages of the hit that it was granted for."""
        self.roster.waiting.remove(active)
        self._take_pages(active, self._hit_within(active, granted), lands=False)
        active.phase = Phase.RUNNING
        active.last_step = self.steps - 1  # no right of way over those that were served in the last step

    def _hit_within(self, active: ActiveRequest, room: Pages) -> Hit:
        return self.roster.fitting(active, self._starts.look(active, self.steps), room)

    def _take_pages(self, active: ActiveRequest, hit: Hit, *, lands: bool) -> None:
        self._starts.pin(active, hit)
        self.roster.take_pages(active, hit)
        self._starts.go_on_from(active, hit, self.steps, lands=lands)
