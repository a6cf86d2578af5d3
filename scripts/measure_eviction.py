"""What eviction costs: prompt tokens that are computed when the cache is too small, by our rule and by others.

    python -m scripts.measure_eviction [--snapshots 12 32] [--seeds 2] [--rules ours equal LRU]

The real scheduler and prefix cache without a model (``tests/reproductions/model_free.py``): only who computes what is counted. Loads:
agents: SWE agents' turns, 8 episodes side by side; every turn's prompt is the turn before it, its answer and a tool's result.
chat: 12 conversations side by side behind one of four system prompts; every tenth turn is asked twice, the answer thrown away.
families: 400 prompts behind 16 beginnings of 400 to 3,000 tokens, some asked for more often than others.
Rules: ours; equal: as ours, but without a guess of how likely each kind of state is wanted; LRU.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.policies import Policies
from engine.prefix_cache.eviction import Score, greedy_dual, least_recently_used
from engine.prefix_cache.nodes import Snapshot
from engine.request import EngineRequest, TokensEvent
from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from loadgen.swe.tools import TOOLS
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams
from tests.reproductions.model_free import VOCAB, ModelFreeCore

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[1] / "demo/checkpoint/tokenizer.json"))
Asked = tuple[list[int], int]
"""Prompt, output tokens. Whoever takes it appends the answer to the prompt."""


@dataclass(frozen=True, slots=True)
class Result:
    computed: int
    """Prompt tokens."""
    total: int
    evicted: int
    """Snapshots."""


def equal(snapshot: Snapshot) -> float:
    return snapshot.clock + snapshot.gain * (1 + snapshot.hits)


RULES: dict[str, Score] = {"ours": greedy_dual, "equal": equal, "LRU": least_recently_used}

# --- loads


class Episode:
    """Pieces of one agent's conversation in turn: what the client adds, how long the answer is, what the client adds, ..."""

    def __init__(self, seed: int) -> None:
        messages = expert_messages(make_instance(seed))
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        self.history = _ids(json.dumps(TOOLS) + "".join(_text(message) for message in messages[:first]))
        self.turns: list[tuple[int, list[int]]] = []
        for index in range(first, len(messages)):
            ids = _ids(_text(messages[index]))
            if messages[index]["role"] == "assistant":
                self.turns.append((len(ids), []))
            else:
                self.turns[-1][1].extend(ids)


def _text(message: dict[str, Any]) -> str:
    return f"<|{message['role']}|>{json.dumps(message)}"


def _ids(text: str) -> list[int]:
    return [token % VOCAB for token in TOKENIZER.encode(text).ids]  # the model-free core knows few tokens


def _random(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]


def agents(draw: random.Random, episodes: int = 32, beside: int = 8) -> Iterator[Asked]:
    seeds = iter(range(episodes))
    running = [Episode(next(seeds)) for _ in range(beside)]
    while running:
        episode = draw.choice(running)
        answer, result = episode.turns.pop(0)
        yield episode.history, answer
        episode.history.extend(result)
        if not episode.turns:
            running.remove(episode)
            running += [Episode(seed) for seed in [next(seeds, None)] if seed is not None]


class Conversation:
    def __init__(self, draw: random.Random, system: Sequence[int], turns: int) -> None:
        self.history = [*system, *_random(draw, 100)]
        self.turns_left = turns


def chat(draw: random.Random, conversations: int = 80, beside: int = 12) -> Iterator[Asked]:
    systems = [_random(draw, length) for length in (300, 500, 900, 1500)]
    coming = iter([Conversation(draw, draw.choice(systems), draw.randrange(1, 8)) for _ in range(conversations)])
    running = [next(coming) for _ in range(beside)]
    while running:
        one = draw.choice(running)
        if draw.random() < 0.1:
            yield list(one.history), 40
        yield one.history, draw.randrange(20, 120)
        one.history += _random(draw, draw.randrange(10, 120))
        one.turns_left -= 1
        if one.turns_left == 0:
            running.remove(one)
            running += [each for each in [next(coming, None)] if each is not None]


def families(draw: random.Random, prompts: int = 400, beginnings: int = 16) -> Iterator[Asked]:
    begins = [_random(draw, draw.randrange(400, 3000)) for _ in range(beginnings)]
    often = [1 / rank for rank in range(1, beginnings + 1)]
    for _ in range(prompts):
        (begin,) = draw.choices(begins, often)
        yield begin + _random(draw, draw.randrange(16, 160)), 16


LOADS: dict[str, Callable[[random.Random], Iterator[Asked]]] = {"agents": agents, "chat": chat, "families": families}

# --- measuring


def main() -> None:
    args = _arguments()
    table = Table("load", "states", *args.rules, title="prompt tokens computed (states evicted)")
    for load, asked in LOADS.items():
        for snapshots in args.snapshots:
            results = [
                [_run(RULES[rule], snapshots, args.blocks, asked(random.Random(seed))) for seed in range(args.seeds)] for rule in args.rules
            ]
            table.add_row(load, str(snapshots), *map(_cell, results))
    Console(width=140).print(table)


def _run(score: Score, snapshots: int, blocks: int, load: Iterator[Asked]) -> Result:
    core = ModelFreeCore(
        Policies(score=score), speculation=7, snapshot_slots=snapshots, kv_blocks=blocks, step_tokens=8192, max_prefill_chunk=256
    )
    total = 0
    for number, (prompt, output) in enumerate(load):
        total += len(prompt) - 1
        key = RequestKey(RequestId(str(number)), 0)
        core.submit(EngineRequest(key=key, token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=output, ignore_eos=True)))
        while core.has_work():
            for event in core.step():
                if isinstance(event, TokensEvent):
                    prompt.extend(event.token_ids)
    counters = core.counters()
    return Result(int(counters["baton_prompt_tokens_total"]), total, int(counters["baton_cache_evicted_snapshots_total"]))


def _cell(results: Sequence[Result]) -> str:
    return f"{mean(one.computed / one.total for one in results):.1%} ({round(mean(one.evicted for one in results))})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, nargs="+", default=[12, 32], help="most states that the cache keeps")
    parser.add_argument("--blocks", type=int, default=6000, help="KV blocks of the pool")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each load, whose mean is told")
    parser.add_argument("--rules", choices=RULES, nargs="+", default=list(RULES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
