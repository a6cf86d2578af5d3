"""Report A's experiment on the real planner, scheduler and cache: random schedules, and an oracle that reads the slots themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from engine.config import ChunkPolicy
from engine.policies import OURS, Policies
from engine.prefix_cache.nodes import Snapshot
from engine.prefix_cache.observer import PublishRecord, ResumeRecord
from engine.prefix_cache.publishing import Claim, PublishView, publish_reached
from engine.request import EngineRequest, FailedEvent, Origin, SealedEvent
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams
from tests.reproductions.column_publishing import REFUSED, publish_columns, publish_columns_and_ends
from tests.reproductions.model_free import ModelFreeCore

BLOCK, GRID, K = 16, 1600, 3
OFFSETS = (331, 1599, 1601, 2531, 3011)
BUDGETS = (1600, 1777, 3200, 8192)
FLUSH_EVERY = 25
"""Schedules that share one cache: what one leaves, the next may hit."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One configuration of the experiment."""

    policy: ChunkPolicy
    offset: int
    """Where the first prompt of a schedule ends, and later ones go on."""
    partial_hits: bool
    """On: any position can be hit. Off: only the grid is published, and the state at ``offset`` arrives from a peer."""


def arrangements() -> Iterator[Arrangement]:
    for policy, offset, partial_hits in product(("strict", "soft"), OFFSETS, (True, False)):
        yield Arrangement("strict" if policy == "strict" else "soft", offset, partial_hits)


def publish_grid(view: PublishView) -> Sequence[Claim]:
    return [claim for claim in publish_reached(view) if claim.position % view.grid == 0]


def ours(arrangement: Arrangement) -> Policies:
    return OURS if arrangement.partial_hits else replace(OURS, publish=publish_grid)


def columns(arrangement: Arrangement, *, believed: bool) -> Policies:
    """Report A's server: the old rule, and columns for what they should hold."""
    publish = publish_columns_and_ends if arrangement.partial_hits else publish_columns
    return replace(REFUSED, publish=publish, enforce_tags=not believed)


@dataclass(frozen=True, slots=True, order=True)
class Lie:
    """A state that was kept, or gone on from, as another one than it is."""

    claimed: int
    held: int | None
    purpose: str

    def __str__(self) -> str:
        return f"{self.purpose}: hashed as state@{self.claimed} but holds state@{self.held}"


class Oracle:
    """Looks into the slots. Knows nothing of tags."""

    def __init__(self, core: ModelFreeCore) -> None:
        self._core = core
        self.lies: list[Lie] = []
        self.num_published = 0
        self.num_resumed = 0

    def published(self, record: PublishRecord) -> None:
        self.num_published += 1
        self.check(record.claimed, record.slot, "publish")

    def resumed(self, record: ResumeRecord) -> None:
        self.num_resumed += 1
        self.check(record.claimed, record.snapshot.slot, "resume")

    def evicted(self, snapshot: Snapshot) -> None:
        """Nobody wrote it since."""
        self.check(snapshot.position, snapshot.slot, "evict")

    def refused(self, record: PublishRecord) -> None:
        pass

    def check(self, claimed: int, slot: int, purpose: str) -> None:
        held = self._core.held(slot)
        if held != claimed:
            self.lies.append(Lie(claimed, held, purpose))


@dataclass(frozen=True, slots=True)
class Outcome:
    schedules: int
    published: int
    resumed: int
    refused: int
    poisoned_schedules: int
    lies: tuple[Lie, ...]
    """The first ones."""


def make_core(policies: Policies, policy: ChunkPolicy, budget: int, **config: Any) -> ModelFreeCore:
    settings: dict[str, Any] = {
        "chunk_policy": policy, "step_tokens": budget, "max_prefill_chunk": 8192, "snapshot_tokens": GRID, "block_tokens": BLOCK,
        "speculation": K, "max_running": 6, "kv_blocks": 2400, "snapshot_slots": 24,
    }  # fmt: skip
    return ModelFreeCore(policies, **(settings | config))


def run_schedules(arrangement: Arrangement, count: int, policies: Policies, seed: int = 0) -> Outcome:
    """``count`` random schedules, on one engine for each budget."""
    rng = random.Random(f"{seed} {arrangement}")
    cores = [make_core(policies, arrangement.policy, budget) for budget in BUDGETS]
    drivers = [_Driver(core, arrangement, rng) for core in cores]
    poisoned = sum(drivers[number * len(drivers) // count].run(number) for number in range(count))
    oracles = [driver.oracle for driver in drivers]
    return Outcome(
        schedules=count,
        published=sum(oracle.num_published for oracle in oracles),
        resumed=sum(oracle.num_resumed for oracle in oracles),
        refused=sum(core.audit.total for core in cores),
        poisoned_schedules=poisoned,
        lies=tuple(lie for oracle in oracles for lie in oracle.lies)[:100],
    )


class _Driver:
    """Schedules one after the other on one engine."""

    def __init__(self, core: ModelFreeCore, arrangement: Arrangement, rng: random.Random) -> None:
        self._core, self._arrangement, self._rng = core, arrangement, rng
        self.oracle = Oracle(core)
        core.observe(self.oracle)

    def run(self, number: int, max_steps: int = 1000) -> bool:
        """Whether it poisoned the cache."""
        if number % FLUSH_EVERY == 0:
            self._core.flush_cache()
        before = len(self.oracle.lies)
        family = self._rng.randrange(8)
        coming = self._arrivals(number, family)
        for step in range(max_steps):
            while coming and coming[0][0] <= step:
                self._submit(coming.pop(0)[1])
            if not coming and not self._core.has_work():
                return len(self.oracle.lies) > before
            for event in self._core.step():
                assert not isinstance(event, FailedEvent), event
                if isinstance(event, SealedEvent):
                    self.oracle.check(event.position, event.slot, "seal")
                    self._core.release(event.key)
        raise AssertionError(f"schedule {number} isn't done after {max_steps} steps: {self._core.load()}")

    def _arrivals(self, number: int, family: int) -> list[tuple[int, EngineRequest]]:
        """(step, request), by step: one whose state is at the offset, some that go on from what it shares, some that don't."""
        rng, offset = self._rng, self._arrangement.offset
        requests = [(0, self._request(f"{number}-first", self._prompt(family, offset + 1), remote=not self._arrangement.partial_hits))]
        for index in range(rng.randint(1, 3)):
            of = family if rng.random() < 0.75 else rng.randrange(8)
            shared = rng.choice((offset, offset, offset, rng.randint(1, 2 * GRID)))
            tokens = self._prompt(of, shared) + self._prompt(rng.randrange(8), rng.randint(1, GRID + GRID // 2))
            requests.append((rng.randint(0, 4), self._request(f"{number}-{index}", tokens, seals=rng.random() < 0.3)))
        return sorted(requests, key=lambda each: each[0])

    def _prompt(self, family: int, length: int) -> tuple[int, ...]:
        return (family,) * length

    def _request(self, name: str, tokens: tuple[int, ...], *, seals: bool = False, remote: bool = False) -> EngineRequest:
        origin: Origin = "remote" if remote else "seal" if seals else "local"
        sampling = SamplingParams(max_tokens=self._rng.randint(1, 9), ignore_eos=True)
        return EngineRequest(key=RequestKey(RequestId(name), 0), token_ids=tokens, origin=origin, sampling=sampling)

    def _submit(self, request: EngineRequest) -> None:
        if request.origin != "remote":
            self._core.submit(request)
            return
        landing = self._core.reserve(request)
        assert landing is not None, "a schedule begins on an empty engine"
        if not landing.complete:
            self._core.receive(landing.slot, landing.position)
            self._core.land(request.key)
