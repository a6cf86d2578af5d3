"""What eviction costs: prompt tokens that agents' turns compute when the cache is too small, by our rule and by plain LRU.

    python -m scripts.measure_eviction [--episodes 12] [--agents 6]

The real scheduler and prefix cache without a model (``tests/reproductions/model_free.py``): only who computes what is counted. The load is
the SWE agent's: every turn's prompt is the turn before it, its answer and a tool's result. ``--agents`` episodes go on side by side and
take turns at random, so that between two turns of one there are some of the others; then each is asked once more for its last turn.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.policies import Policies
from engine.prefix_cache.eviction import greedy_dual, least_recently_used
from engine.request import EngineRequest, TokensEvent
from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from loadgen.swe.tools import TOOLS
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams
from tests.reproductions.model_free import VOCAB, ModelFreeCore

SIZES = ((200, 4000), (24, 4000), (12, 4000), (6, 4000), (200, 400))
"""Snapshots, KV blocks."""
RULES = {"ours": greedy_dual, "LRU": least_recently_used}
TOKENIZER = Path(__file__).parents[1] / "demo/checkpoint/tokenizer.json"


class Episode:
    """Pieces of one conversation in turn: what the client adds, how long the answer is, what the client adds, ..."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        messages = expert_messages(make_instance(seed))
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        self.history = _ids(tokenizer, json.dumps(TOOLS) + "".join(_text(message) for message in messages[:first]))
        self.turns: list[tuple[int, list[int]]] = []
        for index in range(first, len(messages)):
            ids = _ids(tokenizer, _text(messages[index]))
            if messages[index]["role"] == "assistant":
                self.turns.append((len(ids), []))
            else:
                self.turns[-1][1].extend(ids)


def _text(message: dict[str, Any]) -> str:
    return f"<|{message['role']}|>{json.dumps(message)}"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token % VOCAB for token in tokenizer.encode(text).ids]  # the model-free core knows few tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--agents", type=int, default=6)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    console = Console(width=160)
    table = Table("snapshots", "KV blocks", *(f"{rule}: computed" for rule in RULES), *(f"{rule}: states evicted" for rule in RULES))
    for snapshots, blocks in SIZES:
        results = [_run(score, snapshots, blocks, args, tokenizer) for score in RULES.values()]
        shares = [f"{computed:,} of {total:,} ({computed / total:.1%})" for computed, total, _ in results]
        table.add_row(str(snapshots), str(blocks), *shares, *(str(evicted) for *_, evicted in results))
    console.print(table)


def _run(score: Any, snapshots: int, blocks: int, args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Computed and all prompt tokens, and evicted snapshots."""
    core = ModelFreeCore(
        Policies(score=score), speculation=7, snapshot_slots=snapshots, kv_blocks=blocks, step_tokens=8192, max_prefill_chunk=256
    )
    total = 0
    for number, (prompt, output) in enumerate(_turns(args, tokenizer, core)):
        total += len(prompt) - 1
        key = RequestKey(RequestId(str(number)), 0)
        core.submit(EngineRequest(key=key, token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=output, ignore_eos=True)))
        while core.has_work():
            for event in core.step():
                if isinstance(event, TokensEvent):
                    prompt.extend(event.token_ids)
    counters = core.counters()
    return int(counters["baton_prompt_tokens_total"]), total, int(counters["baton_cache_evicted_snapshots_total"])


def _turns(args: argparse.Namespace, tokenizer: Tokenizer, core: ModelFreeCore) -> Iterator[tuple[list[int], int]]:
    """(prompt, output tokens); the caller appends the answer to the prompt."""
    draw = random.Random(1)
    seeds = iter(range(args.episodes))
    running = [Episode(next(seeds), tokenizer) for _ in range(args.agents)]
    while running:
        episode = draw.choice(running)
        answer, result = episode.turns.pop(0)
        yield episode.history, answer
        episode.history.extend(result)
        if not episode.turns:
            running.remove(episode)
            following: Sequence[int] = [seed for seed in [next(seeds, None)] if seed is not None]
            running += [Episode(seed, tokenizer) for seed in following]


if __name__ == "__main__":
    main()
