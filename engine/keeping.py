"""After a step, never before (invariant 3): what the cache keeps of a request, and what a peer may read of it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.active import ActiveRequest, Phase
from engine.advance import Advance
from engine.book import Book
from engine.config import EngineConfig
from engine.policies import Policies
from engine.pools import Pools
from engine.prefix_cache.cache import PrefixCache, Who
from engine.prefix_cache.publishing import Claim, PublishView
from engine.request import EngineEvent, ReadyEvent, SealedEvent
from engine.scheduler import Scheduler
from protocol.errors import StateAuditError
from protocol.ids import RequestKey


class Keeper:
    """``has_mtp``: blocks hold MTP's KV as well, and only what it has followed is kept."""

    def __init__(
        self,
        config: EngineConfig,
        pools: Pools,
        cache: PrefixCache | None,
        policies: Policies,
        scheduler: Scheduler,
        book: Book,
        *,
        has_mtp: bool,
    ) -> None:
        self._config = config
        self._pools = pools
        self._cache = cache
        self._policies = policies
        self._scheduler = scheduler
        self._book = book
        self._has_mtp = has_mtp
        self._previous: dict[RequestKey, int] = {}
        """See ``Policies.previous_states``; during a step only."""

    # --- the cache

    def keep(self, active: ActiveRequest, claims: Sequence[Claim]) -> None:
        """KV up to ``computed`` and the claimed states."""
        if self._cache is None or active.trail is None:
            return
        assert not self._has_mtp or active.mtp_known >= active.computed, "MTP's KV is a part of the blocks"
        who = Who(active.key, self._scheduler.steps, active.told)
        self._cache.publish(active.trail, active.tokens, active.blocks, active.computed, claims, who)

    def keep_step(self, step: Advance) -> None:
        """What a step brought: a chunk, or with its last token an answer. While a request decodes its blocks stay its own."""
        if not step.token_ids or step.finish is not None:
            self.keep(step.active, self._claims(step))

    def _claims(self, step: Advance) -> Sequence[Claim]:
        active = step.active
        view = PublishView(
            first=step.base,
            computed=active.computed,
            slot=active.slots[0],
            prefill=not step.token_ids,
            prefill_end=active.prefill_end,
            grid=self._config.snapshot_tokens,
            branches=frozenset(active.branches),
            ended=step.finish is not None,
            previous=self._previous.get(active.key),
        )
        return self._policies.publish(view)

    def remember_previous(self, active: ActiveRequest) -> None:
        """Copy the state before its chunk, if there is room."""
        slots = self._pools.slots
        if slots.num_available > 0:
            (self._previous[active.key],) = slots.take(1)
            slots.copy(active.slots[0], self._previous[active.key])

    def forget_previous(self) -> None:
        self._pools.slots.give(self._previous.values())
        self._previous.clear()

    # --- peers

    def offer(self, active: ActiveRequest) -> list[EngineEvent]:
        """Say which blocks of a prefill for a peer are final, and seal when all are."""
        events: list[EngineEvent] = []
        full = active.computed // self._config.block_tokens
        if full > active.published_blocks:
            blocks = tuple(active.blocks[active.published_blocks : full])
            events.append(ReadyEvent(key=active.key, first_block=active.published_blocks, blocks=blocks))
            active.published_blocks = full
        if active.computed == len(active.tokens):
            events.append(self._seal(active))
        return events

    def _seal(self, active: ActiveRequest) -> EngineEvent:
        try:
            self._pools.slots.audit(active.slots[0], len(active.tokens), "seal")
        except StateAuditError as error:
            return self._book.fail(active, error)
        active.phase = Phase.SEALED
        active.tell(f"sealed at {active.computed}")
        return SealedEvent(
            key=active.key,
            position=active.computed,
            blocks=tuple(active.blocks),
            slot=active.slots[0],
            cached_tokens=active.cached_tokens,
        )
