"""What it brings to wait for another's prefill: requests that come at once and begin alike, with the rule and without.

    python -m scripts.measure_waits [CHECKPOINT] [--shared 16 32 64 128 256 512] [--requests 8] [--own 64] [--runs 5]

For each length of the common beginning, which nobody has computed yet, three ways in turns on one engine: ``never`` waits for a part,
``always`` does for any common block, ``ours`` does for ``engine.prefix_cache.leaders.MIN_GAIN`` tokens or more. Mean and last time to
the first token, and prompt tokens computed. Random prompts; the cache is flushed between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.core import EngineCore
from engine.engine import Engine
from engine.prefix_cache import leaders
from engine.request import EngineRequest, TokensEvent
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams

RULES = {"never": 1_000_000, "always": 1, "ours": leaders.MIN_GAIN}
"""Least tokens that a wait must spare."""
DEMO = Path(__file__).parents[1] / "demo/checkpoint"
_numbers = count()


@dataclass
class Result:
    shared: int
    rule: str
    mean: list[float] = field(default_factory=list)
    """Of each run: the mean time to the first token, in ms."""
    last: list[float] = field(default_factory=list)
    computed: int = 0
    """Prompt tokens, in the last run."""


def main() -> None:
    args = _arguments()
    results = [Result(shared, rule) for shared in args.shared for rule in RULES]
    with Engine(args.model, threads=args.threads) as engine:
        for run in range(-1, args.runs):
            for result in results:
                with _least_gain(RULES[result.rule]):
                    times, computed = _measure(engine.core, result.shared, args, random.Random(f"{run} {result.shared}"))
                if run >= 0:  # the first one warms up
                    result.mean.append(statistics.mean(times))
                    result.last.append(max(times))
                    result.computed = computed
    if args.json:
        print(json.dumps({"load_1min": os.getloadavg()[0], "results": [asdict(result) for result in results]}))
    else:
        _show(results, args)


@contextmanager
def _least_gain(tokens: int) -> Iterator[None]:
    usual, leaders.MIN_GAIN = leaders.MIN_GAIN, tokens
    try:
        yield
    finally:
        leaders.MIN_GAIN = usual


def _measure(core: EngineCore, shared: int, args: argparse.Namespace, draw: random.Random) -> tuple[list[float], int]:
    """Milliseconds to each request's first token, and the prompt tokens that were computed."""
    core.flush_cache()
    before = core.counters()["baton_prompt_tokens_total"]
    common = _tokens(draw, shared, core)
    prompts = {RequestKey(RequestId(str(next(_numbers))), 0): common + _tokens(draw, args.own, core) for _ in range(args.requests)}
    started = time.perf_counter()
    for key, tokens in prompts.items():
        core.submit(EngineRequest(key=key, token_ids=tokens, sampling=SamplingParams(max_tokens=1, ignore_eos=True)))
    times = []
    while core.has_work():
        tokens_came = sum(isinstance(event, TokensEvent) for event in core.step())
        times += [1000 * (time.perf_counter() - started)] * tokens_came
    return times, int(core.counters()["baton_prompt_tokens_total"] - before)


def _tokens(draw: random.Random, number: int, core: EngineCore) -> tuple[int, ...]:
    return tuple(draw.randrange(3, core.model_info.vocab_size) for _ in range(number))


def _show(results: list[Result], args: argparse.Namespace) -> None:
    title = f"{args.requests} requests at once, {args.own} tokens of their own each; medians (lowest .. highest)"
    table = Table("shared", "waits", "first token, mean, ms", "first token, last, ms", "tokens computed", title=title)
    for result in results:
        table.add_row(str(result.shared), result.rule, _spread(result.mean), _spread(result.last), str(result.computed))
    Console(width=140).print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO, help="checkpoint directory")
    parser.add_argument("--shared", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt behind the common ones")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
