"""The engine: requests in, one step at a time, events out. One thread, no I/O; a step ends with all kernels finished.

No clock decides anything; one is read to say how much time the prefix cache saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kernels
from engine.active import ActiveRequest, Phase
from engine.audit import AuditLog
from engine.book import Book
from engine.capacity import check_request, plan_capacity, torch_dtype
from engine.config import EngineConfig
from engine.deep_audit import DeepAudit
from engine.drafter import Drafter
from engine.file_tier import FileTier, open_file_tier
from engine.keeping import Keeper
from engine.limits import limits_of
from engine.models.info import ModelInfo
from engine.models.loader import load_model
from engine.policies import OURS, Policies, check_tier
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache
from engine.prefix_cache.nodes import Salt, Why
from engine.prefix_cache.observer import CacheObserver
from engine.prefix_cache.publishing import Claim
from engine.prefix_cache.stats import CacheStats, Savings
from engine.prefix_cache.tier import SecondTier
from engine.request import CachedPrefix, EngineEvent, EngineRequest, Landing, StartedEvent
from engine.runner import Model, Runner
from engine.sampling import Sampler
from engine.scheduler import Scheduler
from engine.stepping import Stepper
from protocol.errors import StaleMessage
from protocol.ids import RequestKey
from protocol.messages import Load
from protocol.regions import Region

log = logging.getLogger("baton.cache")

VIOLATIONS = "baton_state_audit_violations_total"
AUDIT_TOKENS = 16_384
"""Longer hits are not computed again: bounds the memory of the deep audit."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    info: ModelInfo


class EngineCore:
    """Every request that was taken ends once: by FinishedEvent or FailedEvent, or by ``cancel``.

    A seal request ends by SealedEvent or FailedEvent, and keeps its pages until ``release`` or ``cancel``: a peer may be reading them.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None, policies: Policies = OURS) -> None:
        """Load the model (or take ``loaded``) and build the pools. Raises CheckpointError, or ValueError that names the setting."""
        check_tier(config, policies)
        self.config = config
        self.kernels = kernels.select(config.kernels, config.threads)
        if loaded is None:
            loaded = LoadedModel(*load_model(config.model, self.kernels.ops, torch_dtype(config.dtype), config.mtp))
        self.loaded = loaded
        self.model_info = loaded.info
        dims = loaded.model.dims
        self.capacity = plan_capacity(config, dims, loaded.info)
        self.pools = Pools(dims, self.capacity.num_blocks, self.capacity.num_slots, config.block_tokens, torch_dtype(loaded.info.dtype))
        self.regions: tuple[Region, Region] = self.pools.regions()
        self.audit = AuditLog()
        self.cache = self._make_cache(policies) if config.prefix_cache else None
        """None when it is switched off."""
        self._scheduler = Scheduler(self.pools, limits_of(config), policies, self.cache)
        self._book = Book(self._scheduler, self.audit)
        self._keeper = Keeper(config, self.pools, self.cache, policies, self._scheduler, self._book, has_mtp=loaded.info.has_mtp)
        self._stepper = self._make_stepper(policies)
        self._savings = Savings()
        self._deep_audit = self._make_deep_audit() if self.cache is not None and config.audit_sample > 0 else None
        self._tier = self._make_tier(config.snapshot_dir) if self.cache is not None and config.snapshot_dir is not None else None

    def _make_cache(self, policies: Policies) -> PrefixCache:
        info = self.model_info
        salt = Salt(weights_digest=info.weights_digest, adapter=None, dtype=info.dtype, cache_salt=None)
        return PrefixCache(self.pools, salt=salt, max_snapshots=self.capacity.snapshot_slots, policies=policies, audit=self.audit)

    def _make_deep_audit(self) -> DeepAudit:
        max_tokens = min(self.capacity.max_model_len, AUDIT_TOKENS)
        audit = DeepAudit(self.loaded.model, self.pools, self.audit, sample=self.config.audit_sample, max_tokens=max_tokens)
        self.observe(audit)
        return audit

    def _make_tier(self, directory: Path) -> FileTier:
        try:
            tier = open_file_tier(directory, self.config.snapshot_dir_bytes, self.model_info, self.pools)
        except OSError as error:
            raise ValueError(f"snapshot_dir={str(directory)!r} is not possible: {error.strerror}") from None
        self.attach_tier(tier)
        return tier

    def _make_stepper(self, policies: Policies) -> Stepper:
        model, info = self.loaded.model, self.model_info
        drafter = Drafter(model, self.pools) if info.has_mtp else None
        growth = self._scheduler.growth
        return Stepper(Runner(model, self.pools), drafter, policies, self._book, growth, self._keeper, info.eos_token_ids)

    def close(self) -> None:
        """After the last step: what the cache keeps goes to its second tier, if it has one, and is written. May be called again."""
        tier, self._tier = self._tier, None
        if self.cache is not None and tier is not None:
            tier.leave()
            self.cache.spill_all()
            self.cache.attach_tier(None)
            tier.close()

    # --- requests come and go

    def submit(self, request: EngineRequest) -> None:
        """Take a ``local`` or ``seal`` request. Raises ValueError, with the numbers, for one that can never run here."""
        if request.origin == "remote":
            raise ValueError("a remote request needs pages before it can be taken: reserve() it")
        active = self._new(request)
        self._scheduler.roster.wait(active)
        self._book.enter(active)

    def reserve(self, request: EngineRequest) -> Landing | None:
        """Take a ``remote`` request with all the pages it needs to start, or None: no room now, nothing was changed.

        Raises ValueError like ``submit``. The pages are the transfer's until ``land`` or ``cancel``, but for the blocks that
        are here already. ``complete``: so is the state; the request runs, and is to be landed no more.
        """
        if request.origin != "remote":
            raise ValueError(f"only remote requests land, this one is {request.origin}")
        if len(request.token_ids) < 2:
            raise ValueError("a prompt of one token has no state to fetch: submit() it as local")
        active = self._new(request)
        if not self._scheduler.reserve(active):
            return None
        self._book.enter(active)
        position = len(request.token_ids) - 1
        blocks = active.blocks[: self.pools.blocks.blocks_for(position)]
        return Landing(
            blocks=tuple(blocks),
            slot=active.slots[0],
            position=position,
            have_blocks=max(active.kv_known, active.computed) // self.config.block_tokens,
            complete=active.computed == position,
        )

    def land(self, key: RequestKey) -> None:
        """All bytes of the hand-off are in place and verified. Raises StaleMessage when the request isn't waiting for them (any more)."""
        active = self._book.requests.get(key)
        if active is None or active.phase is not Phase.LANDING:
            raise StaleMessage(f"{key} is not waiting for a hand-off")
        position = len(active.tokens) - 1
        self.pools.slots.tags[active.slots[0]] = position
        active.computed = active.mtp_known = position
        active.phase = Phase.RUNNING
        active.tell(f"landed at {position}")
        self._keeper.keep(active, [Claim(position, active.slots[0], Why.LANDED)])
        self._book.stalled = False

    def cancel(self, key: RequestKey, *, keep: bool = False) -> bool:
        """Forget the request, whatever it is doing, and free its pages. False when it is unknown: it has ended before.

        For a landing or sealed request the caller sees to it that no transfer touches its pages any more.
        ``keep``: its answer is over as far as the client is concerned, and its next turn goes on from here: the cache keeps it.
        """
        active = self._book.requests.get(key)
        if active is not None:
            if keep and active.phase is Phase.RUNNING and active.decoding:
                self._keeper.keep(active, [Claim(active.computed, active.slots[0], Why.OUTPUT)])
            self._book.forget(active)
        return active is not None

    def release(self, key: RequestKey) -> None:
        """The hand-off is over, well or not: free the pages it held. Once or more often, it is the same."""
        active = self._book.requests.get(key)
        if active is not None and active.phase is Phase.SEALED:
            self._book.forget(active)

    def has_work(self) -> bool:
        """False also when all that is there waits for something from outside: a landing, a release, a cancel."""
        return (bool(self._book.requests) and not self._book.stalled) or (self._deep_audit is not None and self._deep_audit.has_work())

    # --- the prefix cache

    def cached(self, token_ids: Sequence[int], cache_salt: str | None = None) -> CachedPrefix:
        """What a request with the prompt ``token_ids`` could go on from now. Changes nothing, promises nothing."""
        if self.cache is None or len(token_ids) == 0:
            return CachedPrefix(state_tokens=0, kv_tokens=0)
        return self.cache.peek(token_ids, len(token_ids) - 1, cache_salt)

    def flush_cache(self) -> int:
        """Forget all prefixes; returns how many entries that were. What runs goes on, and leaves nothing behind."""
        if self._tier is not None:
            self._tier.clear()
        return self.cache.flush() if self.cache is not None else 0

    def cache_stats(self) -> CacheStats:
        return self.cache.stats() if self.cache is not None else CacheStats()

    def observe(self, observer: CacheObserver) -> None:
        """Tell ``observer`` from now on what the cache does. Nothing when it is switched off."""
        if self.cache is not None:
            self.cache.observe(observer)

    def attach_tier(self, tier: SecondTier) -> None:
        if self.cache is not None:
            self.cache.attach_tier(tier)

    # --- what is told

    def load(self) -> Load:
        return self._scheduler.roster.load()

    def counters(self) -> dict[str, float]:
        """Totals since the start, by metric name, and the cache's gauges."""
        stats = self.cache_stats()
        saved = {"baton_cache_saved_seconds_total": self._savings.count(stats.hit_tokens, self._stepper.seconds_per_prefill_token)}
        preempted = {"baton_preemptions_total": float(self._scheduler.growth.preemptions)}
        told = self._book.counters() | {VIOLATIONS: float(self.audit.total)}
        told |= preempted | stats.counters() | saved
        for part in (self._deep_audit, self._tier):
            told |= part.counters() if part is not None else {}
        return told

    def check_integrity(self) -> None:
        """Between steps: every page is free or owned once, and every tag is true. Raises AssertionError with the story."""
        self._scheduler.roster.check_integrity()
        self._book.check_integrity()

    # --- a step

    def step(self) -> list[EngineEvent]:
        """One batch through the model. A request's own failure ends that request; a failure of the batch ends its requests.

        When the batch holds first chunks, a call that only says so comes before the one that computes: whoever takes the time
        of a StartedEvent has it before the work, not after.
        """
        plan = self._scheduler.plan()
        events = self._seal_what_was_found() + self._tell_started([planned.active for planned in plan])
        self._book.stalled = not (plan or events)  # what was sealed makes room for others
        if self._deep_audit is not None and not events and self._deep_audit.work(busy=bool(plan)):
            log.error("a state that was gone on from is not what it was said to be: the prefix cache forgets all that it keeps")
            self.flush_cache()
        if events or not plan:
            return events
        self._scheduler.serve(plan)
        return self._stepper.step(plan)

    def _seal_what_was_found(self) -> list[EngineEvent]:
        """Prefills that the cache had whole: there is no step for them."""
        events: list[EngineEvent] = []
        for active in self._scheduler.roster.found_whole():
            events += self._tell_started([active])
            events += self._keeper.offer(active)
        return events

    def _tell_started(self, actives: Sequence[ActiveRequest]) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for active in actives:
            if not active.started and active.request.origin != "remote":
                events.append(StartedEvent(key=active.key, cached_tokens=active.cached_tokens))
            active.started = True
        return events

    # --- one request's beginning and end

    def _new(self, request: EngineRequest) -> ActiveRequest:
        if request.key in self._book.requests:
            raise ValueError(f"{request.key} is already here")
        check_request(request, self.model_info.vocab_size, self.capacity, self.config.block_tokens)
        sampler = None
        if request.origin != "seal":
            sampler = Sampler(request.sampling, request.token_ids, self.model_info.eos_token_ids, self.model_info.vocab_size)
        trail = self.cache.trail(request.cache_salt) if self.cache is not None and request.use_cache else None
        return ActiveRequest(request=request, arrival=self._book.arrivals, sampler=sampler, trail=trail)
