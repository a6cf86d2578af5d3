"""One batch through the model, from its plan to its events."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from torch import Tensor

from engine.active import ActiveRequest
from engine.advance import Advance, advance, new_entries
from engine.book import Book
from engine.drafter import ChooseDraft, Drafter, Entries
from engine.growth import Growth
from engine.keeping import Keeper
from engine.planned import Planned
from engine.policies import Policies
from engine.request import EngineEvent, FinishedEvent, TokensEvent
from engine.rows import Row, RowKind
from engine.runner import RowOutput, Runner
from engine.sampling import NO_TOKEN
from protocol.errors import LogitsError, StateAuditError

MEASURED_TOKENS = 32
"""What fewer prompt tokens in a step take is the step's own time, not theirs."""

log = logging.getLogger(__name__)


class Stepper:
    """A request's own failure ends that request; a failure of the batch ends its requests."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None,
        policies: Policies,
        book: Book,
        growth: Growth,
        keeper: Keeper,
        eos_token_ids: Collection[int],
    ) -> None:
        """``drafter``: None for a checkpoint without MTP."""
        self.runner = runner
        self.drafter = drafter
        self._policies = policies
        self._book = book
        self._growth = growth
        self._keeper = keeper
        self._eos_token_ids = eos_token_ids
        self._prefill_tokens, self._prefill_seconds = 0, 0.0

    @property
    def seconds_per_prefill_token(self) -> float:
        """Of steps with MEASURED_TOKENS of them, shared out by tokens; 0 before the first one. What savings are estimated from."""
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0

    def step(self, plan: Sequence[Planned]) -> list[EngineEvent]:
        start = perf_counter()
        events: list[EngineEvent] = []
        with torch.inference_mode():
            self._run(plan, events)
        self._count(plan, perf_counter() - start)
        return events

    def _count(self, plan: Sequence[Planned], seconds: float) -> None:
        prefill = sum(planned.count for planned in plan if not planned.kind.is_window)
        if prefill >= MEASURED_TOKENS:
            self._prefill_tokens += prefill
            self._prefill_seconds += seconds * prefill / sum(planned.count for planned in plan)
        self._book.counts["baton_steps_total"] += 1

    def _run(self, plan: Sequence[Planned], events: list[EngineEvent]) -> None:
        begun = self._begin(plan, events)
        advanced = self._advance(begun, self._forward(begun, events), events)
        followed = self._follow([step for step in advanced if step.finish is None or step.active.trail is not None], events)
        for step in followed:
            self._keeper.keep_step(step)
        self._keeper.forget_previous()
        for step in advanced:
            if step.finish is not None:
                events.append(self._finish(step))
        for step in followed:  # and nobody else: the blocks of the others lack MTP's KV
            if step.active.seals:
                events += self._keeper.offer(step.active)

    # --- the model

    def _begin(self, plan: Sequence[Planned], events: list[EngineEvent]) -> list[tuple[ActiveRequest, Row]]:
        begun: list[tuple[ActiveRequest, Row]] = []
        for planned in plan:
            if self._policies.previous_states and planned.kind is RowKind.EXTEND:
                self._keeper.remember_previous(planned.active)
            try:
                begun.append((planned.active, planned.begin()))
            except StateAuditError as error:
                events.append(self._book.fail(planned.active, error))
        return begun

    def _forward(self, begun: Sequence[tuple[ActiveRequest, Row]], events: list[EngineEvent]) -> list[RowOutput]:
        """Empty when the model raised: then nothing of the step counts, and its requests have failed."""
        if not begun:
            return []
        try:
            return self.runner.run([row for _, row in begun])
        except Exception as error:  # the step's edge: whatever the model raises ends these requests, not the engine
            log.exception("a step of %d rows failed", len(begun))
            for active, _ in begun:
                assert active.state is not None
                active.state.abort()
                events.append(self._book.fail(active, error))
            return []

    # --- its tokens

    def _advance(
        self, begun: Sequence[tuple[ActiveRequest, Row]], outputs: Sequence[RowOutput], events: list[EngineEvent]
    ) -> list[Advance]:
        advanced: list[Advance] = []
        for (active, row), output in zip(begun, outputs, strict=False):  # no outputs: all have failed
            try:
                step = advance(active, row, output, self._eos_token_ids)
            except Exception as error:  # one request's own failure: the others go on
                events.append(self._book.fail(active, error))
                continue
            self._count_tokens(step)
            if step.token_ids:
                index = active.num_output - len(step.token_ids)
                events.append(TokensEvent(key=active.key, index=index, token_ids=step.token_ids, logprobs=step.logprobs))
            advanced.append(step)
        return advanced

    def _count_tokens(self, step: Advance) -> None:
        counts = self._book.counts
        if not step.token_ids:
            counts["baton_prompt_tokens_total"] += step.active.computed - step.base
            return
        counts["baton_output_tokens_total"] += len(step.token_ids)
        counts["baton_proposed_drafts_total"] += step.proposed_drafts
        counts["baton_accepted_drafts_total"] += step.accepted_drafts

    def _finish(self, step: Advance) -> FinishedEvent:
        active = step.active
        assert step.finish is not None
        self._book.forget(active)
        return FinishedEvent(
            key=active.key,
            reason=step.finish.reason,
            stop_token_id=step.finish.stop_token_id,
            steps=active.steps,
            proposed_drafts=active.proposed_drafts,
            accepted_drafts=active.accepted_drafts,
            cached_tokens=active.cached_tokens,
        )

    # --- MTP

    def _follow(self, advanced: Sequence[Advance], events: list[EngineEvent]) -> Sequence[Advance]:
        """Bring MTP's KV up to the committed tokens, and draft for the next windows. Returns those that it went well for: all or none."""
        if self.drafter is None or not advanced:
            return advanced
        items = [self._entries(step) for step in advanced]
        try:
            drafts = self.drafter.follow(items)
        except Exception as error:  # as in _forward
            log.exception("drafting for %d requests failed", len(items))
            events += [self._book.fail(step.active, error) for step in advanced if step.finish is None]
            return ()
        for step, item, guesses in zip(advanced, items, drafts, strict=True):
            step.active.mtp_known = max(1, item.first + len(item.token_ids))
            step.active.drafts = guesses
        return advanced

    def _entries(self, step: Advance) -> Entries:
        active = step.active
        num_drafts = self._growth.grant_drafts(active) if active.decoding and step.finish is None else 0
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
                self._book.counts["baton_draft_failures_total"] += 1
                log.warning("%s: no draft: %s", active.key, error)
                return None

        return choose
