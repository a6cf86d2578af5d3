"""What one step makes of one request: tokens are chosen, the state is committed, and what that implies is written down."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.active import ActiveRequest
from engine.drafter import ChooseDraft, Entries
from engine.finish import FinishDecision, cut_at_finish
from engine.rows import Row
from engine.runner import RowOutput
from engine.sampling import WindowResult
from protocol.messages import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """``active`` went from ``base`` computed tokens to ``active.computed``."""

    active: ActiveRequest
    base: int
    output: RowOutput
    token_ids: tuple[int, ...] = ()
    """New output tokens, up to and with the one that ends the sequence."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishDecision | None = None
    proposed_drafts: int = 0
    accepted_drafts: int = 0


def advance(active: ActiveRequest, row: Row, output: RowOutput, eos_token_ids: Collection[int]) -> Advance:
    """Called when the step has run. Raises LogitsError, or StateAuditError when the state isn't where it is claimed to be."""
    assert active.state is not None
    active.state.written()
    if not row.logits_at:
        active.computed = active.state.commit(len(row.token_ids))
        return Advance(active=active, base=row.first, output=output)
    result = _choose(active, row, output)
    tokens, finish = cut_at_finish(active.request.sampling, eos_token_ids, active.output, result.tokens)
    active.computed = active.state.commit(len(tokens))
    active.tell(f"{row.kind.value} at {row.first} with {len(active.drafts)} drafts, committed {len(tokens)}")
    proposed, accepted = len(active.drafts), min(len(tokens), len(result.tokens) - 1)  # all but the last were drafts
    active.steps += 1
    active.proposed_drafts += proposed
    active.accepted_drafts += accepted
    active.drafts, active.decoding = (), True
    active.tokens += tokens
    assert active.computed == len(active.tokens) - 1, "the newest token is known and not computed"
    return Advance(
        active=active,
        base=row.first,
        output=output,
        token_ids=tuple(tokens),
        logprobs=result.logprobs[: len(tokens)] if result.logprobs is not None else None,
        finish=finish,
        proposed_drafts=proposed,
        accepted_drafts=accepted,
    )


def _choose(active: ActiveRequest, row: Row, output: RowOutput) -> WindowResult:
    sampler = active.sampler
    assert sampler is not None, "a request that seals samples nothing"
    first_position = len(active.tokens)
    if sampler.plain_greedy(active.num_output):
        return sampler.accept_greedy(output.greedy, active.drafts, first_position)
    return sampler.accept_window(output.logits, active.drafts, first_position, active.output)


def new_entries(step: Advance, num_drafts: int, choose: ChooseDraft) -> Entries:
    """The MTP entries that became true with the step: up to the computed tokens, and the newest token's when it drafts.

    Entry i needs the hidden state at i-1. The first may need that of the position before the step: the hidden tail.
    """
    active = step.active
    first, end = active.mtp_known, active.computed + (1 if num_drafts > 0 else 0)
    before = first - 1 - step.base
    assert before >= (-1 if step.base > 0 else 0), f"no hidden state for entry {first} after a step from {step.base}"
    hidden = step.output.hidden[max(before, 0) : max(end - 1 - step.base, 0)]
    if before < 0:
        hidden = torch.cat([step.output.tail[None], hidden])
    return Entries(
        blocks=active.blocks, first=first, token_ids=active.tokens[first:end], hidden=hidden, num_drafts=num_drafts, choose=choose
    )
