"""The deep audit: a sample of cache hits is computed again from the first token, and compared with what was gone on from.

It has pages and a runner of its own, on the same weights: it takes nothing from requests but time, and little of that. One
audit at a time; hits that would come meanwhile, or are too long for its pages, are counted as skipped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from engine.audit import AuditLog, Violation
from engine.drafter import Drafter, Entries
from engine.pools import Pools
from engine.prefix_cache.nodes import Snapshot
from engine.prefix_cache.observer import PublishRecord, ResumeRecord
from engine.rows import Row, RowKind
from engine.runner import Model, Runner
from kernels.contract import SINK

RUNNING, CLAIMED = SINK + 1, SINK + 2
"""Our slots: the recomputed state, and a copy of the one that was gone on from."""
TOLERANCE = 1e-3
"""Largest difference that other chunk boundaries may make, relative to the largest value of the layer's part of the state."""
IDLE_TOKENS = 64
"""In one piece, while nobody waits: a request that comes then waits for one piece at most."""
BUSY_TOKENS, BUSY_STEPS = 32, 8
"""Beside requests: so many tokens before every so many steps."""

log = logging.getLogger("baton.audit")


@dataclass(slots=True, kw_only=True)
class _Job:
    record: ResumeRecord
    done: int = 0

    @property
    def end(self) -> int:
        return self.record.claimed


class DeepAudit:
    """An observer of the prefix cache and a background work of the core."""

    def __init__(self, model: Model, pools: Pools, audit_log: AuditLog, *, sample: float, max_tokens: int) -> None:
        """``sample``: share of the hits, 0 < sample <= 1. ``pools``: the engine's. Memory: KV of twice ``max_tokens``, and two slots."""
        assert 0 < sample <= 1, f"a sample of {sample}"
        self._pools = pools
        self._sample, self._credit = sample, 1.0  # the first hit is audited
        self._table = list(range(SINK + 1, SINK + 1 + ceil(max_tokens / pools.blocks.block_tokens)))
        self._max_tokens = max_tokens
        self._own = Pools(
            model.dims, 2 * len(self._table) + 1, CLAIMED + 1, pools.blocks.block_tokens, pools.slots.tensor.dtype
        )  # untouched pages cost nothing
        self._runner = Runner(model, self._own)
        self._drafter = Drafter(model, self._own) if model.dims.num_mtp_attention_layers else None
        self._log = audit_log
        self._job: _Job | None = None
        self._busy_steps = 0
        self._counts: Counter[str] = Counter()
        self.largest_difference = 0.0
        """Of all audits that passed."""

    # --- what the cache tells

    def resumed(self, record: ResumeRecord) -> None:
        self._credit += self._sample
        if self._credit < 1:
            return
        self._credit -= 1
        if self._job is not None or record.claimed > self._max_tokens:
            self._counts["skipped"] += 1
            return
        self._own.slots.tensor[CLAIMED] = self._pools.slots.tensor[record.snapshot.slot]
        self._own.blocks.tensor[self._claimed_blocks(record.claimed)] = self._pools.blocks.tensor[list(record.blocks)]
        self._job = _Job(record=record)

    def published(self, record: PublishRecord) -> None:
        pass

    def refused(self, record: PublishRecord) -> None:
        pass

    def evicted(self, snapshot: Snapshot) -> None:
        pass

    # --- work between steps

    def has_work(self) -> bool:
        return self._job is not None

    def work(self, *, busy: bool) -> bool:
        """A piece of it. True: a state that was gone on from isn't what it was said to be."""
        if self._job is None:
            return False
        self._busy_steps += busy
        if busy and self._busy_steps % BUSY_STEPS:
            return False
        try:
            with torch.inference_mode():
                self._compute(self._job, BUSY_TOKENS if busy else IDLE_TOKENS)
        except Exception:  # the audit's own failure says nothing of the state, and ends no request
            log.exception("could not recompute %d tokens of %s", self._job.end, self._job.record.key)
            self._counts["errors"] += 1
            self._job = None
            return False
        if self._job.done < self._job.end:
            return False
        job, self._job = self._job, None
        return not self._is_true(job)

    def counters(self) -> dict[str, float]:
        counts = {f"baton_deep_audit_{key}_total": float(self._counts[key]) for key in ("passed", "failed", "skipped", "errors", "tokens")}
        return counts | {"baton_deep_audit_largest_difference": self.largest_difference}

    def _compute(self, job: _Job, num_tokens: int) -> None:
        first, end = job.done, min(job.done + num_tokens, job.end)
        row = Row(
            kind=RowKind.START if first == 0 else RowKind.EXTEND,
            first=first,
            token_ids=job.record.tokens[first:end],
            blocks=self._table,
            slot_in=RUNNING,
            slots_out=(RUNNING,),
            samples=False,
        )
        (output,) = self._runner.run([row])
        if self._drafter is not None:
            self._drafter.follow([self._entries(row, torch.cat([output.tail[None], output.hidden[:-1]]))])
        job.done = end
        self._counts["tokens"] += end - first

    def _entries(self, row: Row, hidden: Tensor) -> Entries:
        """``hidden`` [n, d]: at the position before each of the row's tokens. Nothing is before the first, and entry 0 stays empty."""
        skip = int(row.first == 0)
        return Entries(
            blocks=self._table,
            first=row.first + skip,
            token_ids=row.token_ids[skip:],
            hidden=hidden[skip:],
            num_drafts=0,
            choose=lambda logits, greedy, drafts: None,
        )

    # --- the comparison

    def _is_true(self, job: _Job) -> bool:
        """What isn't is told."""
        differences = dict(self._differences(job.end))
        part = max(differences, key=lambda name: differences[name], default="")
        largest = differences.get(part, 0.0)
        if largest <= TOLERANCE:
            self._counts["passed"] += 1
            self.largest_difference = max(self.largest_difference, largest)
            return True
        self._counts["failed"] += 1
        record = job.record
        violation = Violation(
            purpose="recompute",
            request_id=record.key.request_id,
            step=record.step,
            claimed=record.claimed,
            held=record.held if record.held != record.claimed else None,
            story=record.story,
            detail=f"{part} differs by {largest:.2g} of its largest value",
        )
        self._log.record(violation)
        return False

    def _differences(self, end: int) -> list[tuple[str, float]]:
        """By part of a slot, and by KV layer over the tokens [0, end)."""
        slots, theirs = self._own.slots, self._claimed_blocks(end)
        mine = self._table[: len(theirs)]
        found = [(part.name, _difference(slots.part(part.name)[CLAIMED], slots.part(part.name)[RUNNING])) for part in slots.region().parts]
        for layer, part in enumerate(self._own.blocks.region().parts):
            first = int(part.name.startswith("mtp"))  # its index 0 stays empty
            found.append((part.name, _difference(self._keys(layer, theirs, first, end), self._keys(layer, mine, first, end))))
        return found

    def _keys(self, layer: int, blocks: Sequence[int], first: int, end: int) -> Tensor:
        """[2, V, end-first, D]: keys and values of the tokens [first, end)."""
        pages = self._own.kv(layer)[list(blocks)]
        return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first:end]

    def _claimed_blocks(self, end: int) -> list[int]:
        return [block + len(self._table) for block in self._table[: self._own.blocks.blocks_for(end)]]


def _difference(claimed: Tensor, recomputed: Tensor) -> float:
    """Largest absolute difference over the largest absolute value; infinite where one isn't finite."""
    if recomputed.numel() == 0:
        return 0.0
    largest = float((claimed - recomputed).abs().max())
    scale = max(float(recomputed.abs().max()), 1e-30)
    return largest / scale if largest == largest else float("inf")
