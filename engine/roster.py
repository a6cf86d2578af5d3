"""Who waits, who holds pages, and what there is room for. Counts and lists only; no tensor is touched here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from engine.active import ActiveRequest, Phase, waiting_tokens
from engine.admission import Pages, free_room
from engine.limits import Limits
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache
from engine.prefix_cache.nodes import NO_HIT, Hit
from engine.transaction import StateTransaction
from protocol.messages import Load


class Roster:
    """All requests. One that waits holds nothing; one that holds pages has the blocks of all its known tokens, in one run where the
    pool has one, and all its slots: one running, and the window's scratch unless it seals."""

    def __init__(self, pools: Pools, limits: Limits, cache: PrefixCache | None) -> None:
        self._pools = pools
        self._limits = limits
        self._cache = cache
        self.waiting: list[ActiveRequest] = []
        """In order of arrival."""
        self.holding: list[ActiveRequest] = []

    # --- pages

    def room(self) -> Pages:
        """For newcomers."""
        active_rows = [active for active in self.holding if active.phase is not Phase.SEALED]
        return free_room(
            free_blocks=self._pools.blocks.num_available,
            free_slots=self._pools.slots.num_available,
            free_rows=self._limits.max_running - len(active_rows),
            growing=sum(1 for active in active_rows if not active.seals),
        )

    def need(self, active: ActiveRequest, hit: Hit = NO_HIT) -> Pages:
        """What the request takes of what is available, on admission: all that it holds, but for what others use as well."""
        blocks, slots = self._pools.blocks.blocks_for(len(active.tokens)), 1 if active.seals else 1 + self._limits.width
        idle_blocks, idle_slots = self._cache.idle_pages(hit) if self._cache is not None else (0, 0)
        return Pages(blocks=blocks - len(hit.nodes) + idle_blocks, slots=slots + idle_slots)

    def fitting(self, active: ActiveRequest, hit: Hit, room: Pages) -> Hit:
        """A hit is pinned while its state is copied, which takes a page or two more: where there is no room for that, its KV alone."""
        return hit if self.need(active, hit).fits(room) else hit.without_state()

    # --- requests come and go

    def wait(self, active: ActiveRequest) -> None:
        active.phase = Phase.WAITING
        insort(self.waiting, active, key=lambda other: other.arrival)

    def take_pages(self, active: ActiveRequest, hit: Hit) -> None:
        """All that the request needs to start, or to be landed in: the blocks of the hit, which is pinned, and pages of its own."""
        shared, whole = hit.blocks, self.need(active)
        active.blocks = shared + self._pools.blocks.take(whole.blocks - len(shared), shared[-1] if shared else None)
        running, *scratch = self._pools.slots.take(whole.slots)
        active.state = StateTransaction(self._pools.slots, running, scratch)
        self.holding.append(active)
        active.tell(f"admitted with {len(active.blocks)} blocks, slot {active.slots[0]}")

    def give_pages(self, active: ActiveRequest) -> None:
        self.holding.remove(active)
        self._pools.blocks.give(active.blocks)
        self._pools.slots.give(active.slots)
        active.forget_state()

    def drop(self, active: ActiveRequest) -> None:
        """Forget the request; its pages are free at once (see ``engine.pools`` for why that is safe)."""
        if active.phase is Phase.WAITING:
            self.waiting.remove(active)
        else:
            self.give_pages(active)

    # --- what others may know

    def running(self) -> list[ActiveRequest]:
        return [active for active in self.holding if active.phase is Phase.RUNNING]

    def found_whole(self) -> list[ActiveRequest]:
        """Prefills for peers that have nothing left to compute."""
        return [active for active in self.running() if active.found_whole]

    def requests(self) -> Iterable[ActiveRequest]:
        return (*self.waiting, *self.holding)

    def load(self) -> Load:
        running = self.running()
        return Load(
            waiting=len(self.waiting),
            running=len(running),
            waiting_tokens=waiting_tokens([*self.waiting, *running]),
            free_blocks=self._pools.blocks.num_available,
            free_slots=self._pools.slots.num_available,
            held_for_peers=len(self.holding) - len(running),
        )

    def check_integrity(self) -> None:
        """Between steps: pools are whole, waiting requests hold nothing, tags say what is computed. Raises AssertionError."""
        kept = self._cache.check_integrity() if self._cache is not None else ((), ())
        self._pools.check_integrity([active.blocks for active in self.holding], [active.slots for active in self.holding], *kept)
        for active in self.waiting:
            assert active.phase is Phase.WAITING, f"waiting, but {active.phase}: {active.told()}"
            assert not active.blocks, f"waiting with blocks: {active.told()}"
            assert active.state is None, f"waiting with slots: {active.told()}"
        for active in self.holding:
            self._check_held(active)

    def _check_held(self, active: ActiveRequest) -> None:
        assert active.phase is not Phase.WAITING, f"holding, but {active.phase}: {active.told()}"
        assert active.state is not None, f"holding no slot: {active.told()}"
        assert not active.state.is_open, f"a step is still open: {active.told()}"
        running, *scratch = active.state.slots
        tag = self._pools.slots.tags[running]
        assert tag == (active.computed or None), f"slot {running} has tag {tag}, computed is {active.computed}: {active.told()}"
        assert all(self._pools.slots.tags[slot] is None for slot in scratch), f"scratch with a tag: {active.told()}"
        assert len(active.blocks) * self._pools.blocks.block_tokens >= active.computed, f"computed without blocks: {active.told()}"
