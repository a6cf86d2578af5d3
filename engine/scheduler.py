"""Who holds pages and who takes part in the next step. Counts and lists only; no tensor is touched here."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.active import ActiveRequest, Phase, waiting_tokens
from engine.admission import MAX_OVERTAKEN, Pages, choose_admissions, choose_victim, free_room
from engine.config import TailPadding
from engine.planned import Planned
from engine.planner import Candidate, ChunkRule, pads_tail, share_budget
from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache, Who
from engine.prefix_cache.leaders import MIN_GAIN, Leader, choose_wait, common_length, longest_wait
from engine.prefix_cache.nodes import NO_HIT, Hit, Trail
from engine.rows import RowKind
from engine.transaction import StateTransaction
from protocol.messages import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    speculation: int
    """K; every window has K+1 positions."""
    max_running: int
    step_tokens: int
    chunk: ChunkRule
    prefill_tokens: int | None
    """Of all chunks in a step in which others decode."""
    tail_padding: TailPadding

    @property
    def width(self) -> int:
        return self.speculation + 1


class Scheduler:
    """Owns the pages of every request from admission to ``drop``.

    A request that only waits holds nothing. An admitted one holds the blocks of all its known tokens, in one run where the
    pool has one, and all its slots (one running, and the window's scratch unless it seals); while it decodes it grows block by
    block, its window's positions included. When blocks run out, drafts are given up first, then the youngest request. What only the
    cache keeps counts as free: it is given up before anything else.
    """

    def __init__(self, pools: Pools, limits: Limits, policies: Policies, cache: PrefixCache | None) -> None:
        self._pools = pools
        self._limits = limits
        self._policies = policies
        self._cache = cache
        self._waiting: list[ActiveRequest] = []
        self._holding: list[ActiveRequest] = []
        self.steps = 0
        """How many were served."""
        self.preemptions = 0

    # --- requests come and go

    def need(self, active: ActiveRequest, hit: Hit = NO_HIT) -> Pages:
        """What the request takes of what is available, on admission: all that it holds, but for what others use as well."""
        blocks, slots = self._pools.blocks.blocks_for(len(active.tokens)), 1 if active.seals else 1 + self._limits.width
        idle_blocks, idle_slots = self._cache.idle_pages(hit) if self._cache is not None else (0, 0)
        return Pages(blocks=blocks - len(hit.nodes) + idle_blocks, slots=slots + idle_slots)

    def add(self, active: ActiveRequest) -> None:
        """Wait for pages, in order of arrival."""
        active.phase = Phase.WAITING
        insort(self._waiting, active, key=lambda other: other.arrival)

    def reserve(self, active: ActiveRequest) -> bool:
        """Take all pages that a hand-off and the first window need, or nothing. Waiting requests have the same right to overtaking.

        When the cache has the whole of it the request runs at once; a shallower state is of no use to it.
        """
        room, hit = self._room(), self._look(active)
        if hit.state_tokens < active.prefill_end:
            hit = hit.without_state()
        if not self.need(active, hit).fits(room):
            hit = NO_HIT
        if any(other.overtaken >= MAX_OVERTAKEN for other in self._waiting) or not self.need(active, hit).fits(room):
            return False
        for other in self._waiting:
            other.overtaken += 1
        self._take_pages(active, hit)
        active.phase = Phase.RUNNING if active.computed == active.prefill_end else Phase.LANDING
        return True

    def drop(self, active: ActiveRequest) -> None:
        """Forget the request; its pages are free at once (see ``engine.pools`` for why that is safe)."""
        if active.phase is Phase.WAITING:
            self._waiting.remove(active)
        else:
            self._give_pages(active)

    def hold(self, active: ActiveRequest) -> None:
        """A prefill that seals has failed: it computes no more and its state is nobody's, but its pages stay until ``drop``."""
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
        self._grow_by_age()
        self._admit()
        return self._compose()

    def serve(self, plan: Sequence[Planned]) -> None:
        """The plan is run now: its requests had their turn."""
        for planned in plan:
            planned.active.last_step = self.steps
        self.steps += 1

    def grant_drafts(self, active: ActiveRequest) -> int:
        """How many drafts the request's next window may have: useful ones that its blocks, with what is free, have room for.

        Called after a commit, before drafting: the blocks cover the known tokens and that many drafts afterwards.
        """
        wanted = min(self._limits.speculation, active.useful_drafts)
        blocks = self._pools.blocks
        missing = blocks.blocks_for(len(active.tokens) + wanted) - len(active.blocks)
        if wanted > 0 and missing > 0:
            active.blocks += blocks.take(min(missing, blocks.num_available), active.blocks[-1])
        return max(0, min(wanted, self._room_behind(active)))

    def _grow_by_age(self) -> None:
        """A block for each decoding request's next position, the oldest first."""
        for active in sorted(self._running(), key=lambda other: other.arrival):
            if active.phase is Phase.RUNNING and self._lacks_block(active):  # it may have been preempted meanwhile
                while self._pools.blocks.num_available == 0 and self._make_room(active):
                    pass
                if self._pools.blocks.num_available > 0:
                    active.blocks += self._pools.blocks.take(1, active.blocks[-1])

    def _lacks_block(self, active: ActiveRequest) -> bool:
        return len(active.blocks) < self._pools.blocks.blocks_for(len(active.tokens))

    def _room_behind(self, active: ActiveRequest) -> int:
        """Positions behind the last known token that the request's blocks cover; negative when they don't cover that one."""
        return len(active.blocks) * self._pools.blocks.block_tokens - len(active.tokens)

    def _make_room(self, active: ActiveRequest) -> bool:
        """Free some block for ``active``: somebody's drafts, else the youngest request that is younger. False: nobody can give."""
        if any(self._give_up_drafts(other) for other in sorted(self._running(), key=lambda other: -other.arrival)):
            return True
        # Sealed and landing pages are not ours to take: a transfer touches them. A prefill that seals has blocks out for reading.
        preemptable = [other for other in self._running() if not other.seals]
        victim = choose_victim([other.arrival for other in preemptable], active.arrival)
        if victim is None:
            return False
        self._preempt(preemptable[victim])
        return True

    def _give_up_drafts(self, active: ActiveRequest) -> bool:
        """Free the blocks that hold nothing but positions of unverified drafts."""
        keep = self._pools.blocks.blocks_for(len(active.tokens))
        surplus = active.blocks[keep:]
        del active.blocks[keep:]
        self._pools.blocks.give(surplus)
        active.drafts = active.drafts[: max(0, self._room_behind(active))]
        return bool(surplus)

    def _preempt(self, active: ActiveRequest) -> None:
        active.tell(f"preempted at {active.computed}")
        self.preemptions += 1
        self._give_pages(active)
        self.add(active)

    def _admit(self) -> None:
        if not self._waiting:
            return
        room = self._room()
        if room.rows <= 0:
            return
        leaders = [active for active in self._running() if _leads(active)]
        asking = [active for active in self._waiting if not self._waits_for_another(active, leaders)]
        needs = [self.need(active, self._look_within(active, room)) for active in asking]
        admitted = choose_admissions(needs, [active.overtaken for active in asking], room)
        for index, active in enumerate(asking):
            active.overtaken = 0 if index in admitted else active.overtaken + sum(1 for other in admitted if other > index)
        for active in (asking[index] for index in admitted):
            if not self._waits_for_another(active, leaders):
                self._start(active, room)
                leaders += [active] if _leads(active) else []

    def _start(self, active: ActiveRequest, room: Pages) -> None:
        self._waiting.remove(active)
        self._take_pages(active, self._look_within(active, room))
        active.phase = Phase.RUNNING
        active.last_step = self.steps - 1  # no right of way over those that were served in the last step

    def _compose(self) -> list[Planned]:
        ready = [active for active in self._running() if not self._lacks_block(active) and not active.found_whole]
        shares = share_budget(
            [self._candidate(active) for active in ready],
            self._limits.chunk,
            step_tokens=self._limits.step_tokens,
            prefill_tokens=self._limits.prefill_tokens,
            chunk=self._policies.plan_chunk,
        )
        served = [(active, share) for active, share in zip(ready, shares, strict=True) if share > 0]
        beside_speculation = self._limits.speculation > 0 and any(active.decoding for active, _ in served)
        rows = [self._planned(active, share, beside_speculation) for active, share in served]
        return sorted(rows, key=lambda row: row.kind.is_window)

    def _candidate(self, active: ActiveRequest) -> Candidate:
        return Candidate(
            last_step=active.last_step,
            arrival=active.arrival,
            computed=active.computed,
            prefill_end=active.prefill_end,
            branches=sorted(active.branches),
        )

    def _planned(self, active: ActiveRequest, share: int, beside_speculation: bool) -> Planned:
        if active.computed == 0:
            return Planned(active, RowKind.START, share if active.prefill_end > 0 else 1)
        if active.computed < active.prefill_end:
            return Planned(active, RowKind.EXTEND, share)
        if active.decoding:
            return Planned(active, RowKind.VERIFY, 1 + len(active.drafts))
        return self._policies.plan_tail(active, padded=pads_tail(self._limits.tail_padding, beside_speculation=beside_speculation))

    # --- pages

    def _room(self) -> Pages:
        active_rows = [active for active in self._holding if active.phase is not Phase.SEALED]
        return free_room(
            free_blocks=self._pools.blocks.num_available,
            free_slots=self._pools.slots.num_available,
            free_rows=self._limits.max_running - len(active_rows),
            growing=sum(1 for active in active_rows if not active.seals),
        )

    def _take_pages(self, active: ActiveRequest, hit: Hit) -> None:
        """All that the request needs to start, or to be landed in: what the hit brings, and pages of its own."""
        if self._cache is not None and active.trail is not None:
            self._cache.pin(hit, active.trail)
        shared, whole = hit.blocks, self.need(active)
        active.blocks = shared + self._pools.blocks.take(whole.blocks - len(shared), shared[-1] if shared else None)
        running, *scratch = self._pools.slots.take(whole.slots)
        active.state = StateTransaction(self._pools.slots, running, scratch)
        self._holding.append(active)
        active.tell(f"admitted with {len(active.blocks)} blocks, slot {active.slots[0]}")
        if self._cache is not None and active.trail is not None:
            self._go_on_from(active, hit, self._cache, active.trail)

    def _go_on_from(self, active: ActiveRequest, hit: Hit, cache: PrefixCache, trail: Trail) -> None:
        """Where the request starts: at the hit's state. KV that goes farther is read, and not written again."""
        cache.count_lookup(hit)
        if hit.snapshot is not None:
            cache.resume(hit, trail, active.tokens, active.blocks, active.slots[0], self._who(active))
            active.tell(f"goes on from a snapshot of {hit.state_tokens}, KV is known to {hit.kv_tokens}")
        active.computed, active.kv_known = hit.state_tokens, hit.kv_tokens
        active.mtp_known = max(1, active.computed, active.kv_known)
        if not active.started:
            active.cached_tokens = active.computed
        if active.computed + MIN_GAIN <= hit.kv_tokens <= active.prefill_end - self._pools.blocks.block_tokens:
            active.branches.add(hit.kv_tokens)  # others went on differently from here

    def _who(self, active: ActiveRequest) -> Who:
        return Who(active.key, self.steps, active.told)

    def _look(self, active: ActiveRequest) -> Hit:
        if self._cache is None or active.trail is None:
            return NO_HIT
        if not active.sought:
            active.sought = True
            self._cache.restore(active.trail, active.tokens, active.prefill_end, self._who(active))
        return self._cache.look(active.trail, active.tokens, active.prefill_end, self._who(active))

    def _look_within(self, active: ActiveRequest, room: Pages) -> Hit:
        """A hit is pinned while its state is copied, which takes a page or two more: where there is no room for that, none."""
        hit = self._look(active)
        return hit if self.need(active, hit).fits(room) else NO_HIT

    def _waits_for_another(self, active: ActiveRequest, leaders: Sequence[ActiveRequest]) -> bool:
        """Whether one of ``leaders`` computes what this one needs, and will be there sooner than this one could be by itself."""
        if self._cache is None or active.trail is None:
            return False
        others = {other.arrival: other for other in leaders if other.trail is not None and other.trail.salt == active.trail.salt}
        if not others:
            return False
        cached = self._look(active).state_tokens
        wait = choose_wait(
            (_leader(active, other) for other in others.values() if _may_lead(other, active, cached)),
            cached=cached,
            limit=active.prefill_end,
            block_tokens=self._pools.blocks.block_tokens,
            waits=active.held_until is not None,
        )
        if wait is None:
            return False
        if active.held_until is None:
            active.held_until = self.steps + longest_wait(wait.position - cached, self._limits.chunk.max_chunk)
            self._cache.count_wait()
        if self.steps > active.held_until:
            return False
        others[wait.leader].branches.add(wait.position)
        return True

    def _give_pages(self, active: ActiveRequest) -> None:
        self._holding.remove(active)
        self._pools.blocks.give(active.blocks)
        self._pools.slots.give(active.slots)
        active.forget_state()

    def _running(self) -> list[ActiveRequest]:
        return [active for active in self._holding if active.phase is Phase.RUNNING]

    # --- what others may know

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running())

    def load(self) -> Load:
        running = self._running()
        return Load(
            waiting=len(self._waiting),
            running=len(running),
            waiting_tokens=waiting_tokens([*self._waiting, *running]),
            free_blocks=self._pools.blocks.num_available,
            free_slots=self._pools.slots.num_available,
            held_for_peers=len(self._holding) - len(running),
        )

    def found_whole(self) -> list[ActiveRequest]:
        """Prefills for peers that have nothing left to compute."""
        return [active for active in self._running() if active.found_whole]

    def requests(self) -> Iterable[ActiveRequest]:
        return (*self._waiting, *self._holding)

    def check_integrity(self) -> None:
        """Between steps: pools are whole, waiting requests hold nothing, tags say what is computed. Raises AssertionError."""
        kept = self._cache.check_integrity() if self._cache is not None else ((), ())
        self._pools.check_integrity([active.blocks for active in self._holding], [active.slots for active in self._holding], *kept)
        for active in self._waiting:
            assert active.phase is Phase.WAITING, f"waiting, but {active.phase}: {active.told()}"
            assert not active.blocks, f"waiting with blocks: {active.told()}"
            assert active.state is None, f"waiting with slots: {active.told()}"
        for active in self._holding:
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


def _leads(active: ActiveRequest) -> bool:
    """Whether it computes a prefill that the cache will show to others."""
    return active.trail is not None and active.computed < active.prefill_end


def _may_lead(other: ActiveRequest, active: ActiveRequest, cached: int) -> bool:
    """False: they part before anything that is still to be computed. One token tells it of nearly all that have little in common."""
    position = max(other.computed, cached)
    return active.tokens[position : position + 1] == other.tokens[position : position + 1]


def _leader(active: ActiveRequest, other: ActiveRequest) -> Leader:
    if other.arrival not in active.shared:
        active.shared[other.arrival] = common_length(active.tokens, other.tokens)
    return Leader(arrival=other.arrival, computed=other.computed, prefill_end=other.prefill_end, shared=active.shared[other.arrival])
