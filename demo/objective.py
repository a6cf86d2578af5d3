"""What training minimises: the surprise at wanted tokens, of the model and of its MTP module's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.model import Past, TrainedModel
from demo.recipe import Example

DEPTH = 5
"""Drafts after each anchor."""
MAX_ANCHORS = 24
"""Per row; each costs DEPTH passes through the module and the head."""


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor
    """int64 [B, T], padded at the end."""
    wanted: Tensor
    """bool [B, T]."""

    @property
    def wanted_ahead(self) -> Tensor:
        """int64 [B, T]: how many tokens in a row are wanted from each position on."""
        length = self.wanted.shape[1]
        places = torch.arange(length)
        stops = torch.where(self.wanted, length, places)
        return stops.flip(1).cummin(1).values.flip(1) - places


@dataclass(slots=True)
class Score:
    """Sums over wanted tokens and over drafts."""

    loss: float = 0.0
    right: int = 0
    wanted: int = 0
    draft_loss: float = 0.0
    drafts: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.loss + other.loss,
            self.right + other.right,
            self.wanted + other.wanted,
            self.draft_loss + other.draft_loss,
            self.drafts + other.drafts,
        )


def make_batch(examples: Sequence[Example]) -> Batch:
    length = max(len(example.token_ids) for example in examples)
    missing = [length - len(example.token_ids) for example in examples]
    return Batch(
        torch.tensor([example.token_ids + [0] * count for example, count in zip(examples, missing, strict=True)]),
        torch.tensor([example.wanted + [False] * count for example, count in zip(examples, missing, strict=True)]),
    )


def run_beginning(model: TrainedModel, token_ids: Sequence[int]) -> Past:
    """What a common beginning leaves, MTP's share included. Gradients flow through it."""
    past, tokens = Past(), torch.tensor([list(token_ids)])
    model.leave_mtp(tokens, model.forward(tokens, leave=past), past)
    return past


def loss_of(
    model: TrainedModel, batch: Batch, beginning: Sequence[int] | None, num_wanted: int, draft_weight: float, random: torch.Generator
) -> tuple[Tensor, Score]:
    """This batch's share of the mean over ``num_wanted`` tokens, which may lie in several batches."""
    past = None if beginning is None else run_beginning(model, beginning)
    hidden = model.forward(batch.token_ids, past)
    rows, places = torch.where(batch.wanted[:, 1:])
    logits, targets = model.logits(hidden[rows, places]), batch.token_ids[rows, places + 1]
    total = F.cross_entropy(logits, targets, reduction="sum")
    score = Score(total.item(), int((logits.argmax(-1) == targets).sum()), len(targets))
    loss = total / num_wanted
    if draft_weight > 0:
        draft_total, count = _draft_loss(model, batch, hidden, past, random)
        score.draft_loss, score.drafts = draft_total.item(), count
        loss = loss + draft_weight * score.wanted / num_wanted * draft_total / max(count, 1)
    return loss, score


def _draft_loss(model: TrainedModel, batch: Batch, hidden: Tensor, past: Past | None, random: torch.Generator) -> tuple[Tensor, int]:
    """Sum and number, over drafts whose tokens are all wanted, after anchors drawn from all places where one can follow."""
    length, ahead = batch.token_ids.shape[1], batch.wanted_ahead
    chances = torch.rand(ahead.shape[0], length - 1, generator=random).masked_fill(ahead[:, 1:] < 2, -1)
    drawn = chances.topk(min(MAX_ANCHORS, length - 1), dim=1)
    anchors, rows = drawn.indices, torch.arange(len(ahead))[:, None]
    num_drafts = torch.where(drawn.values >= 0, ahead[rows, anchors + 1] - 1, 0)
    total, count = torch.zeros(()), 0
    for depth, output in enumerate(model.drafts(batch.token_ids, hidden, anchors, DEPTH, past), 1):
        valid = num_drafts >= depth
        targets = batch.token_ids[rows, (anchors + depth + 1).clamp(max=length - 1)]
        total = total + F.cross_entropy(model.logits(output[valid]), targets[valid], reduction="sum")
        count += int(valid.sum())
    return total, count
