"""Time between a stream's tokens while long prompts are prefilled in the same worker, by ``prefill_token_budget``.

    python -m scripts.bench_prefill_budget CHECKPOINT [--budgets 0 256 128 64 32] [--streams 4] [--prompts 3] [--prompt-tokens 2048]

One engine for each budget (0: none), in turns. ``--streams`` requests decode all the time, for ``--alone-steps`` steps by themselves, then
beside long prompts that come one after the other, each when the one before has its first token. What counts is the time between
two steps that bring a stream tokens: median, 99th percentile and longest; and the prompts' own time to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.core import EngineCore
from engine.engine import Engine
from engine.request import EngineRequest, TokensEvent
from loadgen.metrics import Spread
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams

STREAM_PROMPT = 32


@dataclass
class Result:
    """All times in ms."""

    budget: int
    alone: list[float] = field(default_factory=list)
    """Between two steps that bring a stream tokens, nothing else going on."""
    beside: list[float] = field(default_factory=list)
    """The same, while a long prompt is prefilled."""
    first_token: list[float] = field(default_factory=list)
    """Of the long prompts."""


class Colocated:
    """Streams that decode all the time in one engine, and a clock for each."""

    def __init__(self, core: EngineCore, args: argparse.Namespace) -> None:
        self._core = core
        self._draw = random.Random(args.seed)
        self._numbers = count()
        self._last: dict[RequestKey, float] = {}
        self._streams = {self._submit(STREAM_PROMPT, args.stream_tokens) for _ in range(args.streams)}
        while len(self._last) < args.streams:
            self.step([])

    def prefill(self, length: int, gaps: list[float]) -> float:
        """Milliseconds to the first token of a new prompt. The streams' gaps meanwhile go to ``gaps``."""
        started, key = time.perf_counter(), self._submit(length, 1)
        while key not in self.step(gaps):
            pass
        return 1000 * (time.perf_counter() - started)

    def step(self, gaps: list[float]) -> set[RequestKey]:
        """Who got tokens."""
        events = [event for event in self._core.step() if isinstance(event, TokensEvent)]
        now = time.perf_counter()
        for event in events:
            if event.key in self._streams:
                if event.key in self._last:
                    gaps.append(1000 * (now - self._last[event.key]))
                self._last[event.key] = now
        return {event.key for event in events}

    def _submit(self, length: int, output: int) -> RequestKey:
        key = RequestKey(RequestId(str(next(self._numbers))), 0)
        tokens = tuple(self._draw.randrange(3, self._core.model_info.vocab_size) for _ in range(length))
        self._core.submit(EngineRequest(key=key, token_ids=tokens, sampling=SamplingParams(max_tokens=output, ignore_eos=True)))
        return key


def main() -> None:
    args = _arguments()
    results = [Result(budget) for budget in args.budgets]
    for run in range(-1, args.runs):
        for result in results:
            measured = _measure(result.budget, args)
            if run >= 0:  # the first one warms up
                result.alone += measured.alone
                result.beside += measured.beside
                result.first_token += measured.first_token
    if args.json:
        print(json.dumps({"load_1min": os.getloadavg()[0], "results": [asdict(result) for result in results]}))
    else:
        _show(results, args)


def _measure(budget: int, args: argparse.Namespace) -> Result:
    result = Result(budget)
    settings = {"prefill_token_budget": budget or None, "threads": args.threads, "prefix_cache": False}
    with Engine(args.model, **settings) as engine:
        load = Colocated(engine.core, args)
        for _ in range(args.alone_steps):
            load.step(result.alone)
        for _ in range(args.prompts):
            result.first_token.append(load.prefill(args.prompt_tokens, result.beside))
    return result


def _show(results: Sequence[Result], args: argparse.Namespace) -> None:
    title = f"{args.streams} streams beside prompts of {args.prompt_tokens} tokens; ms between tokens: p50 / p99 / longest"
    table = Table(
        "budget", "streams alone", "beside a prompt", "p99 over alone's p50", "the prompt's first token (lowest .. highest)", title=title
    )
    for result in results:
        first = result.first_token
        table.add_row(
            str(result.budget or "none"),
            _quantiles(result.alone),
            _quantiles(result.beside),
            f"{_spread(result.beside).p99 / _spread(result.alone).p50:.1f}",
            f"{statistics.median(first):.0f} ({min(first):.0f} .. {max(first):.0f})",
        )
    Console(width=140).print(table)


def _quantiles(values: Sequence[float]) -> str:
    spread = _spread(values)
    return f"{spread.p50:.0f} / {spread.p99:.0f} / {spread.max:.0f}"


def _spread(values: Sequence[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None, "no step brought a stream tokens"
    return spread


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 256, 128, 64, 32], help="tokens; 0 for none")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=1500, help="most tokens of a stream; it has to outlive the prompts")
    parser.add_argument("--prompts", type=int, default=3, help="one after the other, in each run")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--alone-steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
