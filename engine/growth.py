"""A decoding request's blocks grow with it, its window's positions included. Who gives way when there are none left."""

from __future__ import annotations

from engine.active import ActiveRequest, Phase
from engine.admission import choose_victim
from engine.pools import Pools
from engine.roster import Roster


class Growth:
    """When blocks run out, drafts are given up first, then the youngest request. What only the cache keeps counts as free."""

    def __init__(self, pools: Pools, roster: Roster, speculation: int) -> None:
        self._blocks = pools.blocks
        self._roster = roster
        self._speculation = speculation
        self.preemptions = 0

    def grow_by_age(self) -> None:
        """A block for each decoding request's next position, the oldest first."""
        for active in sorted(self._roster.running(), key=lambda other: other.arrival):
            if active.phase is Phase.RUNNING and self.lacks_block(active):  # it may have been preempted meanwhile
                while self._blocks.num_available == 0 and self._make_room(active):
                    pass
                if self._blocks.num_available > 0:
                    active.blocks += self._blocks.take(1, active.blocks[-1])

    def grant_drafts(self, active: ActiveRequest) -> int:
        """How many drafts the request's next window may have: useful ones that its blocks, with what is free, have room for.

        Called after a commit, before drafting: the blocks cover the known tokens and that many drafts afterwards.
        """
        wanted = min(self._speculation, active.useful_drafts)
        missing = self._blocks.blocks_for(len(active.tokens) + wanted) - len(active.blocks)
        if wanted > 0 and missing > 0:
            active.blocks += self._blocks.take(min(missing, self._blocks.num_available), active.blocks[-1])
        return max(0, min(wanted, self._room_behind(active)))

    def lacks_block(self, active: ActiveRequest) -> bool:
        return len(active.blocks) < self._blocks.blocks_for(len(active.tokens))

    def _room_behind(self, active: ActiveRequest) -> int:
        """Positions behind the last known token that the request's blocks cover; negative when they don't cover that one."""
        return len(active.blocks) * self._blocks.block_tokens - len(active.tokens)

    def _make_room(self, active: ActiveRequest) -> bool:
        """Free some block for ``active``: somebody's drafts, else the youngest request that is younger. False: nobody can give."""
        running = self._roster.running()
        if any(self._give_up_drafts(other) for other in sorted(running, key=lambda other: -other.arrival)):
            return True
        # Sealed and landing pages are not ours to take: a transfer touches them. A prefill that seals has blocks out for reading.
        preemptable = [other for other in running if not other.seals]
        victim = choose_victim([other.arrival for other in preemptable], active.arrival)
        if victim is None:
            return False
        self._preempt(preemptable[victim])
        return True

    def _give_up_drafts(self, active: ActiveRequest) -> bool:
        """Free the blocks that hold nothing but positions of unverified drafts."""
        keep = self._blocks.blocks_for(len(active.tokens))
        surplus = active.blocks[keep:]
        del active.blocks[keep:]
        self._blocks.give(surplus)
        active.drafts = active.drafts[: max(0, self._room_behind(active))]
        return bool(surplus)

    def _preempt(self, active: ActiveRequest) -> None:
        active.tell(f"preempted at {active.computed}")
        self.preemptions += 1
        self._roster.give_pages(active)
        self._roster.wait(active)
