"""From the requests that can take part in the next step to its rows. A pure function of them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.active import ActiveRequest
from engine.limits import Limits
from engine.planned import Planned
from engine.planner import Candidate, pads_tail, share_budget
from engine.policies import Policies
from engine.rows import RowKind


def compose(ready: Sequence[ActiveRequest], limits: Limits, policies: Policies) -> list[Planned]:
    """The rows of those that get a share of the step's tokens, prefill rows first."""
    shares = share_budget(
        [_candidate(active) for active in ready],
        limits.chunk,
        step_tokens=limits.step_tokens,
        prefill_tokens=limits.prefill_tokens,
        chunk=policies.plan_chunk,
    )
    served = [(active, share) for active, share in zip(ready, shares, strict=True) if share > 0]
    beside_speculation = limits.speculation > 0 and any(active.decoding for active, _ in served)
    padded = pads_tail(limits.tail_padding, beside_speculation=beside_speculation)
    rows = [_planned(active, share, policies, padded) for active, share in served]
    return sorted(rows, key=lambda row: row.kind.is_window)


def _candidate(active: ActiveRequest) -> Candidate:
    return Candidate(
        last_step=active.last_step,
        arrival=active.arrival,
        computed=active.computed,
        prefill_end=active.prefill_end,
        branches=sorted(active.branches),
    )


def _planned(active: ActiveRequest, share: int, policies: Policies, padded: bool) -> Planned:
    if active.computed == 0:
        return Planned(active, RowKind.START, share if active.prefill_end > 0 else 1)
    if active.computed < active.prefill_end:
        return Planned(active, RowKind.EXTEND, share)
    if active.decoding:
        return Planned(active, RowKind.VERIFY, 1 + len(active.drafts))
    return policies.plan_tail(active, padded=padded)
