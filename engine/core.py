"""The engine: requests in, one step at a time, events out. One thread, no I/O; a step ends with all kernels finished.

No clock decides anything; one is read to say how much time the prefix cache saved.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

import kernels
from engine.active import ActiveRequest, Phase
from engine.advance import Advance, advance, new_entries
from engine.audit import AuditLog, Violation
from engine.capacity import check_request, plan_capacity, torch_dtype
from engine.config import EngineConfig
from engine.deep_audit import DeepAudit
from engine.drafter import ChooseDraft, Drafter, Entries
from engine.file_tier import FileTier, open_file_tier
from engine.models.info import ModelInfo
from engine.models.loader import load_model
from engine.planned import Planned
from engine.planner import ChunkRule
from engine.policies import OURS, Policies
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache, Who
from engine.prefix_cache.nodes import Salt, Why
from engine.prefix_cache.observer import CacheObserver
from engine.prefix_cache.publishing import Claim, PublishView
from engine.prefix_cache.stats import CacheStats
from engine.prefix_cache.tier import SecondTier
from engine.request import (
    CachedPrefix,
    EngineEvent,
    EngineRequest,
    FailedEvent,
    FinishedEvent,
    Landing,
    ReadyEvent,
    SealedEvent,
    StartedEvent,
    TokensEvent,
)
from engine.rows import Row, RowKind
from engine.runner import Model, RowOutput, Runner
from engine.sampling import NO_TOKEN, Sampler
from engine.scheduler import Limits, Scheduler
from protocol.errors import LogitsError, StaleMessage, StateAuditError
from protocol.ids import RequestKey
from protocol.messages import Load
from protocol.regions import Region

log = logging.getLogger(__name__)

VIOLATIONS = "baton_state_audit_violations_total"
AUDIT_TOKENS = 16_384
"""Longer hits are not computed again: bounds the memory of the deep audit."""
COUNTERS = (
    "baton_steps_total",
    "baton_prompt_tokens_total",
    "baton_output_tokens_total",
    "baton_proposed_drafts_total",
    "baton_accepted_drafts_total",
    "baton_draft_failures_total",
    "baton_failed_requests_total",
)


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
        self._runner = Runner(loaded.model, self.pools)
        self._drafter = Drafter(loaded.model, self.pools) if loaded.info.has_mtp else None
        self._policies = policies
        self.audit = AuditLog()
        self.cache = self._make_cache() if config.prefix_cache else None
        """None when it is switched off."""
        self._scheduler = Scheduler(self.pools, _limits(config), policies, self.cache)
        self._requests: dict[RequestKey, ActiveRequest] = {}
        self._arrivals = 0
        self._stalled = False
        self._counts: Counter[str] = Counter()
        self._prefill_tokens, self._prefill_seconds = 0, 0.0
        """Of all steps: what the cache's savings are estimated from."""
        self._previous: dict[RequestKey, int] = {}
        """See ``Policies.previous_states``; during a step only."""
        self._deep_audit = self._make_deep_audit() if self.cache is not None and config.audit_sample > 0 else None
        self._tier = self._make_tier(config.snapshot_dir) if self.cache is not None and config.snapshot_dir is not None else None

    def _make_cache(self) -> PrefixCache:
        info = self.model_info
        salt = Salt(weights_digest=info.weights_digest, adapter=None, dtype=info.dtype, cache_salt=None)
        max_snapshots = self.capacity.snapshot_slots
        return PrefixCache(self.pools, salt=salt, max_snapshots=max_snapshots, policies=self._policies, audit=self.audit)

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

    def close(self) -> None:
        """After the last step: what the cache keeps goes to its second tier, if it has one, and is written. May be called again."""
        tier, self._tier = self._tier, None
        if self.cache is not None and tier is not None:
            self.cache.spill_all()
            self.cache.attach_tier(None)
            tier.close()

    # --- requests come and go

    def submit(self, request: EngineRequest) -> None:
        """Take a ``local`` or ``seal`` request. Raises ValueError, with the numbers, for one that can never run here."""
        if request.origin == "remote":
            raise ValueError("a remote request needs pages before it can be taken: reserve() it")
        active = self._new(request)
        self._scheduler.add(active)
        self._keep(active)

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
        self._keep(active)
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
        active = self._requests.get(key)
        if active is None or active.phase is not Phase.LANDING:
            raise StaleMessage(f"{key} is not waiting for a hand-off")
        position = len(active.tokens) - 1
        self.pools.slots.tags[active.slots[0]] = position
        active.computed = active.mtp_known = position
        active.phase = Phase.RUNNING
        active.tell(f"landed at {position}")
        self._keep_in_cache(active, [Claim(position, active.slots[0], Why.LANDED)])
        self._stalled = False

    def cancel(self, key: RequestKey, *, keep: bool = False) -> bool:
        """Forget the request, whatever it is doing, and free its pages. False when it is unknown: it has ended before.

        For a landing or sealed request the caller sees to it that no transfer touches its pages any more.
        ``keep``: its answer is over as far as the client is concerned, and its next turn goes on from here: the cache keeps it.
        """
        active = self._requests.get(key)
        if active is not None:
            if keep and active.phase is Phase.RUNNING and active.decoding:
                self._keep_in_cache(active, [Claim(active.computed, active.slots[0], Why.OUTPUT)])
            self._forget(active)
        return active is not None

    def release(self, key: RequestKey) -> None:
        """The hand-off is over, well or not: free the pages it held. Once or more often, it is the same."""
        active = self._requests.get(key)
        if active is not None and active.phase is Phase.SEALED:
            self._forget(active)

    def has_work(self) -> bool:
        """False also when all that is there waits for something from outside: a landing, a release, a cancel."""
        return (bool(self._requests) and not self._stalled) or (self._deep_audit is not None and self._deep_audit.has_work())

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
        return self._scheduler.load()

    def counters(self) -> dict[str, float]:
        """Totals since the start, by metric name, and the cache's gauges."""
        stats = self.cache_stats()
        per_token = self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0
        saved = {"baton_cache_saved_seconds_total": stats.hit_tokens * per_token}
        preempted = {"baton_preemptions_total": float(self._scheduler.preemptions)}
        told = {name: float(self._counts[name]) for name in COUNTERS} | {VIOLATIONS: float(self.audit.total)}
        told |= preempted | stats.counters() | saved
        for part in (self._deep_audit, self._tier):
            told |= part.counters() if part is not None else {}
        return told

    def check_integrity(self) -> None:
        """Between steps: every page is free or owned once, and every tag is true. Raises AssertionError with the story."""
        self._scheduler.check_integrity()
        held = {active.key for active in self._scheduler.requests()}
        assert held == self._requests.keys(), f"known {self._requests.keys()}, scheduled {held}"

    # --- a step

    def step(self) -> list[EngineEvent]:
        """One batch through the model. A request's own failure ends that request; a failure of the batch ends its requests.

        When the batch holds first chunks, a call that only says so comes before the one that computes: whoever takes the time
        of a StartedEvent has it before the work, not after.
        """
        plan = self._scheduler.plan()
        self._stalled = not plan
        events = self._seal_what_was_found() + self._tell_started([planned.active for planned in plan])
        if self._deep_audit is not None and not events:
            self._deep_audit.work(busy=bool(plan))
        if events or not plan:
            return events
        self._scheduler.serve(plan)
        start = perf_counter()
        with torch.inference_mode():
            self._run(plan, events)
        self._count_step(plan, perf_counter() - start)
        return events

    def _count_step(self, plan: Sequence[Planned], seconds: float) -> None:
        """A step's time is shared out by tokens."""
        prefill = sum(planned.count for planned in plan if not planned.kind.is_window)
        self._prefill_tokens += prefill
        self._prefill_seconds += seconds * prefill / sum(planned.count for planned in plan)
        self._counts["baton_steps_total"] += 1

    def _seal_what_was_found(self) -> list[EngineEvent]:
        """Prefills that the cache had whole: there is no step for them."""
        events: list[EngineEvent] = []
        for active in self._scheduler.found_whole():
            events += self._tell_started([active])
            self._offer(active, events)
        return events

    def _tell_started(self, actives: Sequence[ActiveRequest]) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for active in actives:
            if not active.started and active.request.origin != "remote":
                events.append(StartedEvent(key=active.key, cached_tokens=active.cached_tokens))
            active.started = True
        return events

    def _run(self, plan: Sequence[Planned], events: list[EngineEvent]) -> None:
        begun = self._begin(plan, events)
        advanced = self._advance(begun, self._forward(begun, events), events)
        followed = self._follow([step for step in advanced if step.finish is None or step.active.trail is not None], events)
        for step in followed:
            if not step.token_ids or step.finish is not None:  # while a request decodes its blocks stay its own
                self._keep_in_cache(step.active, self._claims(step))
        self.pools.slots.give(self._previous.values())
        self._previous.clear()
        for step in advanced:
            if step.finish is not None:
                self._finish(step, events)
        for step in followed:  # and nobody else: the blocks of the others lack MTP's KV
            if step.active.seals:
                self._offer(step.active, events)

    def _begin(self, plan: Sequence[Planned], events: list[EngineEvent]) -> list[tuple[ActiveRequest, Row]]:
        begun: list[tuple[ActiveRequest, Row]] = []
        for planned in plan:
            if self._policies.previous_states and planned.kind is RowKind.EXTEND:
                self._keep_previous(planned.active)
            try:
                begun.append((planned.active, planned.begin()))
            except StateAuditError as error:
                self._fail(planned.active, error, events)
        return begun

    def _keep_previous(self, active: ActiveRequest) -> None:
        slots = self.pools.slots
        if slots.num_available > 0:
            (self._previous[active.key],) = slots.take(1)
            slots.copy(active.slots[0], self._previous[active.key])

    def _forward(self, begun: Sequence[tuple[ActiveRequest, Row]], events: list[EngineEvent]) -> list[RowOutput]:
        """Empty when the model raised: then nothing of the step counts, and its requests have failed."""
        if not begun:
            return []
        try:
            return self._runner.run([row for _, row in begun])
        except Exception as error:  # the step's edge: whatever the model raises ends these requests, not the engine
            log.exception("a step of %d rows failed", len(begun))
            for active, _ in begun:
                assert active.state is not None
                active.state.abort()
                self._fail(active, error, events)
            return []

    def _advance(
        self, begun: Sequence[tuple[ActiveRequest, Row]], outputs: Sequence[RowOutput], events: list[EngineEvent]
    ) -> list[Advance]:
        advanced: list[Advance] = []
        for (active, row), output in zip(begun, outputs, strict=False):  # no outputs: all have failed
            try:
                step = advance(active, row, output, self.model_info.eos_token_ids)
            except Exception as error:  # one request's own failure: the others go on
                self._fail(active, error, events)
                continue
            self._tell_tokens(step, events)
            advanced.append(step)
        return advanced

    def _tell_tokens(self, step: Advance, events: list[EngineEvent]) -> None:
        active = step.active
        if not step.token_ids:
            self._counts["baton_prompt_tokens_total"] += active.computed - step.base
            return
        self._counts["baton_output_tokens_total"] += len(step.token_ids)
        self._counts["baton_proposed_drafts_total"] += step.proposed_drafts
        self._counts["baton_accepted_drafts_total"] += step.accepted_drafts
        index = active.num_output - len(step.token_ids)
        events.append(TokensEvent(key=active.key, index=index, token_ids=step.token_ids, logprobs=step.logprobs))

    def _finish(self, step: Advance, events: list[EngineEvent]) -> None:
        active = step.active
        assert step.finish is not None
        self._forget(active)
        events.append(
            FinishedEvent(
                key=active.key,
                reason=step.finish.reason,
                stop_token_id=step.finish.stop_token_id,
                steps=active.steps,
                proposed_drafts=active.proposed_drafts,
                accepted_drafts=active.accepted_drafts,
                cached_tokens=active.cached_tokens,
            )
        )

    def _follow(self, advanced: Sequence[Advance], events: list[EngineEvent]) -> Sequence[Advance]:
        """Bring MTP's KV up to the committed tokens, and draft for the next windows. Returns those that it went well for: all or none."""
        if self._drafter is None or not advanced:
            return advanced
        items = [self._entries(step) for step in advanced]
        try:
            drafts = self._drafter.follow(items)
        except Exception as error:  # as in _forward
            log.exception("drafting for %d requests failed", len(items))
            for step in advanced:
                if step.finish is None:
                    self._fail(step.active, error, events)
            return ()
        for step, item, guesses in zip(advanced, items, drafts, strict=True):
            step.active.mtp_known = max(1, item.first + len(item.token_ids))
            step.active.drafts = guesses
        return advanced

    def _entries(self, step: Advance) -> Entries:
        active = step.active
        num_drafts = self._scheduler.grant_drafts(active) if active.decoding and step.finish is None else 0
        return new_entries(step, num_drafts, self._draft_chooser(active))

    def _draft_chooser(self, active: ActiveRequest) -> ChooseDraft:
        sampler = active.sampler

        def choose(logits: Tensor, greedy: int, drafts: Sequence[int]) -> int | None:
            assert sampler is not None, "a request that seals drafts nothing"
            if greedy != NO_TOKEN and sampler.plain_greedy(active.num_output + len(drafts)):
                return greedy
            try:
                return sampler.draft_token(logits, len(active.tokens) + len(drafts), [*active.output, *drafts])
            except LogitsError as error:  # a guess less costs time, and no token: the target alone decides
                self._counts["baton_draft_failures_total"] += 1
                log.warning("%s: no draft: %s", active.key, error)
                return None

        return choose

    def _claims(self, step: Advance) -> Sequence[Claim]:
        active = step.active
        view = PublishView(
            first=step.base,
            computed=active.computed,
            slot=active.slots[0],
            prefill=not step.token_ids,
            prefill_end=active.prefill_end,
            grid=self.config.snapshot_tokens,
            branches=frozenset(active.branches),
            ended=step.finish is not None,
            previous=self._previous.get(active.key),
        )
        return self._policies.publish(view)

    def _keep_in_cache(self, active: ActiveRequest, claims: Sequence[Claim]) -> None:
        """KV up to ``computed`` and the claimed states. After the step that made them, never before (invariant 3)."""
        if self.cache is None or active.trail is None:
            return
        assert self._drafter is None or active.mtp_known >= active.computed, "MTP's KV is a part of the blocks"
        who = Who(active.key, self._scheduler.steps, active.told)
        self.cache.publish(active.trail, active.tokens, active.blocks, active.computed, claims, who)

    def _offer(self, active: ActiveRequest, events: list[EngineEvent]) -> None:
        """Say which blocks are final, and seal when all are. After the step that made them, never before (invariant 3)."""
        full = active.computed // self.config.block_tokens
        if full > active.published_blocks:
            blocks = tuple(active.blocks[active.published_blocks : full])
            events.append(ReadyEvent(key=active.key, first_block=active.published_blocks, blocks=blocks))
            active.published_blocks = full
        if active.computed == len(active.tokens):
            self._seal(active, events)

    def _seal(self, active: ActiveRequest, events: list[EngineEvent]) -> None:
        try:
            self.pools.slots.audit(active.slots[0], len(active.tokens), "seal")
        except StateAuditError as error:
            self._fail(active, error, events)
            return
        active.phase = Phase.SEALED
        active.tell(f"sealed at {active.computed}")
        events.append(
            SealedEvent(
                key=active.key,
                position=active.computed,
                blocks=tuple(active.blocks),
                slot=active.slots[0],
                cached_tokens=active.cached_tokens,
            )
        )

    # --- one request's beginning and end

    def _new(self, request: EngineRequest) -> ActiveRequest:
        if request.key in self._requests:
            raise ValueError(f"{request.key} is already here")
        check_request(request, self.model_info.vocab_size, self.capacity, self.config.block_tokens)
        sampler = None
        if request.origin != "seal":
            sampler = Sampler(request.sampling, request.token_ids, self.model_info.eos_token_ids, self.model_info.vocab_size)
        trail = self.cache.trail(request.cache_salt) if self.cache is not None and request.use_cache else None
        return ActiveRequest(request=request, arrival=self._arrivals, sampler=sampler, trail=trail)

    def _keep(self, active: ActiveRequest) -> None:
        self._arrivals += 1
        self._requests[active.key] = active
        self._stalled = False
        active.tell(f"{active.request.origin}, {active.num_prompt} tokens")

    def _forget(self, active: ActiveRequest) -> None:
        self._scheduler.drop(active)
        del self._requests[active.key]
        self._stalled = False

    def _fail(self, active: ActiveRequest, error: Exception, events: list[EngineEvent]) -> None:
        if isinstance(error, StateAuditError):
            self.audit.record(_violation(error, active, self._scheduler.steps))
        self._counts["baton_failed_requests_total"] += 1
        log.error("request failed: %s: %s; story: %s", type(error).__name__, error, active.told())
        if active.seals:
            self._scheduler.hold(active)  # a peer may be reading its blocks: not ours to free (invariant 9)
        else:
            self._forget(active)
        events.append(FailedEvent(key=active.key, message=f"{type(error).__name__}: {error}"))


def _limits(config: EngineConfig) -> Limits:
    return Limits(
        speculation=config.speculation,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        chunk=ChunkRule(
            policy=config.chunk_policy,
            grid=config.snapshot_tokens if config.prefix_cache else config.block_tokens,
            max_chunk=config.max_prefill_chunk,
            tail_tokens=config.speculation + 1,
            backoff_tokens=config.backoff_tokens,
        ),
        prefill_tokens=config.prefill_token_budget,
        tail_padding=config.tail_padding,
    )


def _violation(error: StateAuditError, active: ActiveRequest, step: int) -> Violation:
    return Violation(
        purpose=error.purpose, request_id=active.key.request_id, step=step, claimed=error.claimed, held=error.held, story=active.told()
    )
