"""How good the model is at held-out episodes, without running any: is each of the expert's tokens its first choice?

An episode of which all are is solved in the same words by greedy decoding, so ``solved`` is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demo.model import TrainedModel
from demo.objective import DEPTH, make_batch, run_beginning
from demo.recipe import Recipe
from loadgen.swe.instance import Instance, make_instance

ROWS = 12


@dataclass(slots=True)
class Report:
    seen: Counter[str] = field(default_factory=Counter)
    """Instances by kind of bug."""
    solved: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    """Verifications that greedy decoding with DEPTH drafts would need for the expert's turns, after each turn's first token."""
    tokens: int = 0
    """That these steps yield."""

    @property
    def accuracy(self) -> float:
        return self.solved.total() / max(self.seen.total(), 1)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    def by_kind(self) -> dict[str, float]:
        return {kind: self.solved[kind] / count for kind, count in sorted(self.seen.items())}


@torch.no_grad()
def evaluate(model: TrainedModel, recipe: Recipe, num_instances: int, pool: Executor) -> Report:
    """On instances 0, 1, ..."""
    instances = [make_instance(seed) for seed in range(num_instances)]
    report = Report()
    for part in pool.map(lambda first: _follow(model, recipe, instances[first : first + ROWS]), range(0, num_instances, ROWS)):
        report.seen += part.seen
        report.solved += part.solved
        report.steps += part.steps
        report.tokens += part.tokens
    return report


@torch.no_grad()
def _follow(model: TrainedModel, recipe: Recipe, instances: Sequence[Instance]) -> Report:
    batch = make_batch([recipe.episode(instance) for instance in instances])
    past = run_beginning(model, recipe.beginning)
    hidden = model.forward(batch.token_ids, past)
    right = _is_next(model.logits(hidden), batch.token_ids, 1) | ~batch.wanted.roll(-1, 1)
    anchors = torch.arange(batch.token_ids.shape[1] - 1).expand(len(instances), -1)
    outputs = model.drafts(batch.token_ids, hidden, anchors, DEPTH, past)
    good = torch.stack([_is_next(model.logits(output), batch.token_ids, depth) for depth, output in enumerate(outputs, 2)], -1)
    report = Report()
    for row, instance in enumerate(instances):
        report.seen[instance.kind] += 1
        report.solved[instance.kind] += int(right[row, :-1].all())
        for first, length in _turns(batch.wanted_ahead[row].tolist()):
            report.steps += _num_steps(good[row], first, length)
            report.tokens += length - 1
    return report


def _is_next(logits: Tensor, token_ids: Tensor, distance: int) -> Tensor:
    """bool [B, T of logits]: the first choice is the token so far ahead. False where there is none."""
    ahead = torch.nn.functional.pad(token_ids, (0, distance), value=-1)[:, distance : distance + logits.shape[1]]
    return logits.argmax(-1) == ahead


def _turns(wanted_ahead: Sequence[int]) -> list[tuple[int, int]]:
    """(first place, length) of each stretch of wanted tokens."""
    before = [0, *wanted_ahead[:-1]]
    return [(place, length) for place, (length, last) in enumerate(zip(wanted_ahead, before, strict=True)) if length > 0 and last == 0]


def _num_steps(good: Tensor, first: int, length: int) -> int:
    """``good`` [T, DEPTH]: which drafts would be right after an anchor. The turn's first token comes before any draft."""
    steps, place, left = 0, first - 1, length - 1
    while left > 0:
        accepted = int(good[place].long().cumprod(0).sum())
        place += accepted + 1
        left -= accepted + 1
        steps += 1
    return steps
