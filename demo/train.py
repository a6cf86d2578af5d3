"""Train the shipped checkpoint: ``python -m demo.train``. About an hour on two cores; stop it at any time, it goes on from there.

First copying, from few symbols to all, because nothing else is learned before it; then drills and episodes; then text;
at last a falling learning rate and more weight on the MTP module's drafts.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

import demo
from demo.evaluate import Report, evaluate
from demo.files import CONFIG, EOS_TOKEN_IDS, write_config, write_weights
from demo.model import TrainedModel
from demo.muon import Optimizer
from demo.objective import Score, loss_of, make_batch
from demo.recipe import Example, Recipe
from demo.tokenizer import train_tokenizer, write_tokenizer
from demo.weights import initial_weights
from engine.models.nemotron_h_config import parse_config
from router.chat_template import load_chat_template

NUM_WORKERS = 2
WARM_UP_STEPS = 50
TEXT_TOKENS = 192
"""Per row of text."""
SAVE_EVERY_S = 60
EVALUATE_EVERY_STEPS = 200
NUM_EVALUATED = 96


class Source(StrEnum):
    COPIES = "copies"
    DRILLS = "drills"
    EPISODES = "episodes"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    steps: int
    turns: tuple[Source, ...]
    """Whose turn it is at each step, over and over."""
    rows: int
    """Per step; every second one for each thread."""
    symbols: int = 1_000_000
    """Different tokens in copies, at most."""
    draft_weight: float = 0.0
    rates: tuple[float, float] = (1.0, 1.0)
    """Learning rate at its beginning and end, relative to the optimizer's."""
    goal: float = 2.0
    """The stage ends early when so large a part of the last wanted tokens was right."""


_COPIES, _DRILLS, _EPISODES, _TEXTS = Source
STAGES = (
    Stage(name="copy 32 symbols", steps=3000, turns=(_COPIES,), rows=16, symbols=32, goal=0.8),
    Stage(name="copy 128 symbols", steps=1000, turns=(_COPIES,), rows=16, symbols=128, goal=0.9),
    Stage(name="copy all symbols", steps=1000, turns=(_COPIES,), rows=16, goal=0.95),
    Stage(name="learn", steps=1150, turns=(_DRILLS, _EPISODES, _DRILLS, _DRILLS, _TEXTS), rows=12, draft_weight=0.3),
    Stage(name="read", steps=640, turns=(_TEXTS, _TEXTS, _EPISODES, _TEXTS, _TEXTS, _DRILLS), rows=12, draft_weight=0.3),
    Stage(name="settle", steps=700, turns=(_EPISODES, _TEXTS, _DRILLS, _TEXTS), rows=12, draft_weight=1.0, rates=(1.0, 0.02)),
)


@dataclass(slots=True)
class Position:
    """How far training has come; all that a restart needs besides weights and optimizer."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    right: list[float] = field(default_factory=list)
    """Part of the wanted tokens that were right in the stage's last steps."""


class Training:
    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.seed = work, seed
        self.pool: Executor = ThreadPoolExecutor(NUM_WORKERS)
        self.config = parse_config(CONFIG)
        self.recipe = _make_recipe(work)
        self.parameters = {name: value.requires_grad_() for name, value in initial_weights(self.config, seed).items()}
        self.model = TrainedModel(self.config, self.parameters)
        self.optimizer = Optimizer(self.parameters, self.pool)
        self.position = Position()
        self.scores: dict[Source, deque[Score]] = {source: deque(maxlen=10) for source in Source}
        self._load()

    def steps(self) -> Iterator[Stage]:
        """Each step of what is left, yielded after it is done."""
        while self.position.stage < len(STAGES):
            stage = STAGES[self.position.stage]
            started = time.monotonic()
            self._step(stage)
            self.position.seconds += time.monotonic() - started
            yield stage
            if self.position.step >= stage.steps or _reached(self.position.right, stage.goal):
                self.position.stage, self.position.step, self.position.right = self.position.stage + 1, 0, []

    def _step(self, stage: Stage) -> None:
        """Everything random in it comes from the seed and the step's number, so that a restart changes nothing."""
        random = Random(f"{self.seed} {stage.name} {self.position.step}")
        source = stage.turns[self.position.step % len(stage.turns)]
        rows = sorted((self._draw(source, stage, random) for _ in range(stage.rows)), key=lambda example: len(example.token_ids))
        job = partial(self._half, source, rows, stage.draft_weight, random.randrange(2**32))
        halves = list(self.pool.map(job, range(NUM_WORKERS)))
        parts = zip(*(gradients for gradients, _ in halves), self.parameters.values(), strict=True)
        self.optimizer.step([_total(given, like) for *given, like in parts], _rate(stage, self.position.step))
        score = sum((score for _, score in halves), Score())
        self.scores[source].append(score)
        self.position.right = [*self.position.right[-19:], score.right / score.wanted]
        self.position.step += 1
        self.position.tokens += sum(len(example.token_ids) for example in rows)

    def _draw(self, source: Source, stage: Stage, random: Random) -> Example:
        match source:
            case Source.COPIES:
                return self.recipe.copying(random, stage.symbols)
            case Source.DRILLS:
                return self.recipe.drill(random)
            case Source.EPISODES:
                return self.recipe.random_episode(random)
            case Source.TEXTS:
                return self.recipe.text(random, TEXT_TOKENS)

    def _half(
        self, source: Source, rows: Sequence[Example], draft_weight: float, seed: int, worker: int
    ) -> tuple[tuple[Tensor | None, ...], Score]:
        """Gradients of every second row."""
        random = torch.Generator().manual_seed(seed + worker)
        batch, num_wanted = make_batch(rows[worker::NUM_WORKERS]), sum(sum(example.wanted) for example in rows)
        beginning = self.recipe.beginning if source in (Source.DRILLS, Source.EPISODES) else None
        loss, score = loss_of(self.model, batch, beginning, num_wanted, draft_weight, random)
        return torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True), score

    def evaluate(self, num_instances: int) -> Report:
        return evaluate(self.model, self.recipe, num_instances, self.pool)

    def save(self) -> None:
        parameters = {name: value.detach() for name, value in self.parameters.items()}
        state = {"parameters": parameters, "optimizer": self.optimizer.state(), "position": asdict(self.position)}
        torch.save(state, self.work / "state.new")
        os.replace(self.work / "state.new", self.work / "state.pt")

    def write_checkpoint(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_config(directory, CONFIG, EOS_TOKEN_IDS)
        write_tokenizer(Tokenizer.from_file(str(self.work / "tokenizer.json")), directory, self.config.max_position_embeddings)
        write_weights(directory, {name: value.detach().bfloat16() for name, value in self.parameters.items()})

    def _load(self) -> None:
        file = self.work / "state.pt"
        if not file.is_file():
            return
        state: dict[str, Any] = torch.load(file, weights_only=True)
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        self.optimizer.load_state(state["optimizer"])
        self.position = Position(**state["position"])


def _make_recipe(work: Path) -> Recipe:
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer.json").is_file():
        write_tokenizer(train_tokenizer(CONFIG["vocab_size"]), work, CONFIG["max_position_embeddings"])
    template = load_chat_template(work)
    assert template is not None, "it was just written"
    return Recipe(Tokenizer.from_file(str(work / "tokenizer.json")), template)


def _reached(right: list[float], goal: float) -> bool:
    return len(right) == 20 and sum(right) / 20 >= goal


def _rate(stage: Stage, step: int) -> float:
    first, last = stage.rates
    warm = min(1.0, (step + 1) / WARM_UP_STEPS) if first == last else 1.0
    return warm * (first + (last - first) * step / stage.steps)


def _total(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    return sum((gradient for gradient in gradients if gradient is not None), torch.zeros_like(like))


def _told(scores: Mapping[Source, deque[Score]]) -> str:
    texts = []
    for source, last in scores.items():
        score = sum(last, Score())
        if score.wanted:
            drafts = f", drafts {score.draft_loss / score.drafts:.2f}" if score.drafts else ""
            texts.append(f"{source} {score.loss / score.wanted:.3f} ({score.right / score.wanted:.1%} right{drafts})")
    return "; ".join(texts)


def _told_report(report: Report) -> str:
    kinds = ", ".join(f"{kind} {part:.0%}" for kind, part in report.by_kind().items())
    return f"solved {report.accuracy:.1%} ({kinds}); {report.tokens_per_step:.2f} tokens per step"


def main(
    out: Annotated[Path, typer.Option(help="Where the checkpoint is written at the end.")] = demo.CHECKPOINT,
    work: Annotated[Path, typer.Option(help="What a restart needs is kept here.")] = Path("build/train"),
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so long; go on with the same command.")] = float("inf"),
) -> None:
    """Train the shipped checkpoint and write it."""
    torch.set_num_threads(1)  # two threads with half a batch each do better than two threads within each operation
    console = Console()
    training = Training(work, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    stop_at, saved = time.monotonic() + minutes * 60, time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("start")
        for stage in training.steps():
            position = training.position
            progress.update(task, description=stage.name, completed=position.step, total=stage.steps)
            if position.step % 20 == 0:
                rate = position.tokens / position.seconds
                progress.console.print(
                    f"{stage.name} {position.step}: {_told(training.scores)}; {position.tokens / 1e6:.2f}M tokens, {rate:.0f}/s",
                    highlight=False,
                )
            if stage.draft_weight and position.step % EVALUATE_EVERY_STEPS == 0:
                progress.console.print(_told_report(training.evaluate(NUM_EVALUATED)), highlight=False)
            if time.monotonic() - saved > SAVE_EVERY_S:
                training.save()
                saved = time.monotonic()
            if time.monotonic() > stop_at:
                break
    training.save()
    console.print(_told_report(training.evaluate(300)), highlight=False)
    training.write_checkpoint(out)
    console.print(f"{out}: {training.position.tokens / 1e6:.1f}M tokens in {training.position.seconds / 60:.0f} minutes", highlight=False)


if __name__ == "__main__":
    typer.run(main)
