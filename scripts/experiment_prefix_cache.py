"""Is what a prefix cache gives back true? Greedy answers through the split with the cache on and off, token for token.

    python -m scripts.experiment_prefix_cache [CHECKPOINT] [--prompts 200] [--concurrency 32] [--policies MODULE:ATTRIBUTE]

Prompts of mixed lengths, cut from this repository's own texts, begin alike in a tree of ways; so many at once share a tight token
budget, on one prefill and one decode worker. First without cache, then with one: cold, and warm twice. With ``--policies`` the
clusters with a cache run with these (a fault from tests/reproductions/), and the table shows how many answers it spoils.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.cluster import LocalCluster, free_port
from baton.models import resolve_model
from baton.up import plan_cluster
from protocol.config import UpSettings

ROOT = Path(__file__).parents[1]
TRIES = 60
COUNTERS = (
    "baton_worker_prompt_tokens_total",
    "baton_cache_hit_tokens_total",
    "baton_cache_evicted_blocks_total",
    "baton_cache_evicted_snapshots_total",
    "baton_state_audit_violations_total",
)
"""Of all workers together."""


@dataclass(frozen=True, slots=True)
class Pass:
    name: str
    wrong: int
    """Answers that differ from those without cache."""
    prompt_tokens: int
    cached_tokens: int
    """As the answers' usage says."""
    seconds: float
    counters: dict[str, int]
    """What each counter gained."""


@dataclass(frozen=True, slots=True)
class Reply:
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


async def main() -> None:
    args = _arguments()
    prompts = make_prompts(args.prompts, args.seed, args.longest)
    with tempfile.TemporaryDirectory() as folder:
        off = await _run(args, prompts, _config(Path(folder) / "off.toml", args, cache=False), ["off"], truth=None)
        on = await _run(args, prompts, _config(Path(folder) / "on.toml", args, cache=True), ["cold", "warm", "warm again"], truth=off[0][1])
    passes = [told for told, _ in (*off, *on)]
    if args.json:
        print(json.dumps({"settings": _settings(args), "passes": [asdict(one) for one in passes]}))
    else:
        _show(passes, args)


def make_prompts(count: int, seed: int, longest: int) -> list[str]:
    """Each begins like one of the roots or like an earlier prompt, for a part of it or for all, and goes on with words of its own."""
    draw = random.Random(seed)
    words = " ".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md"))).split()

    def passage(length: int) -> list[str]:
        start = draw.randrange(len(words) - length)
        return words[start : start + length]

    roots = [passage(length) for length in (20, 80, 200, min(400, longest))]
    prompts: list[list[str]] = []
    for _ in range(count):
        base = draw.choice([*roots, *roots, *prompts[-16:]])
        shared = base if draw.random() < 0.5 else base[: draw.randint(1, len(base))]
        prompts.append([*shared, *passage(draw.choice((1, 1, 2, 5, 17, 60)))][:longest])
    return [" ".join(prompt) for prompt in prompts]


async def _run(
    args: argparse.Namespace, prompts: Sequence[str], config: Path, names: Sequence[str], truth: list[Reply] | None
) -> list[tuple[Pass, list[Reply]]]:
    """A cluster of its own, and the prompts through it once for each name."""
    settings = UpSettings(model=args.model, port=free_port(), prefill=1, decode=1, speculation=args.speculation, threads=args.threads)
    plan = plan_cluster(settings, config, {})
    passes = []
    async with LocalCluster(plan.specs, plan.url, lambda name, line: None) as cluster:
        await cluster.ready()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=plan.url, timeout=600, limits=limits, trust_env=False) as client:
            for name in names:
                before, started = await _counters(client), time.perf_counter()
                replies = await _ask_all(client, prompts, args)
                seconds = time.perf_counter() - started
                after = await _counters(client)
                wrong = sum(one.token_ids != right.token_ids for one, right in zip(replies, truth or replies, strict=True))
                gained = {key: int(after[key] - before[key]) for key in COUNTERS}
                tokens, cached = sum(one.prompt_tokens for one in replies), sum(one.cached_tokens for one in replies)
                passes.append((Pass(name, wrong, tokens, cached, round(seconds, 1), gained), replies))
    return passes


async def _ask_all(client: httpx.AsyncClient, prompts: Sequence[str], args: argparse.Namespace) -> list[Reply]:
    seats = asyncio.Semaphore(args.concurrency)

    async def one(prompt: str) -> Reply:
        body = {"prompt": prompt, "max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with seats:
            told = await _ask(client, body)
        usage = told["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Reply(tuple(told["choices"][0]["token_ids"]), usage["prompt_tokens"], cached)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Again, when a worker was taken for dead in the middle of it, as happens on a machine that is too busy for heartbeats."""
    for _ in range(TRIES):
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == httpx.codes.OK:
            break
        await asyncio.sleep(1.0)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """After a heartbeat, so that what has just ended is in."""
    await asyncio.sleep(1.2)
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")) for name in COUNTERS}


def _config(path: Path, args: argparse.Namespace, *, cache: bool) -> Path:
    """What ``baton up`` has no flag for."""
    lines = [
        f"prefix_cache = {str(cache).lower()}",
        f"max_running = {args.concurrency}",
        f"step_tokens = {args.step_tokens}",
        f"max_prefill_chunk = {min(256, args.step_tokens)}",
        f"snapshot_tokens = {args.snapshot_tokens}",
        f'chunk_policy = "{args.chunk_policy}"',
    ]
    lines += [f"kv_blocks = {args.kv_blocks}"] if args.kv_blocks else []
    lines += [f'policies = "{args.policies}"'] if args.policies and cache else []
    path.write_text("\n".join(lines) + "\n")
    return path


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()} | {"load_1min": os.getloadavg()[0]}


def _show(passes: Sequence[Pass], args: argparse.Namespace) -> None:
    title = f"{args.prompts} prompts, {args.concurrency} at once, {args.step_tokens} tokens a step, K = {args.speculation}"
    table = Table(
        "cache", "wrong answers", "prompt tokens", "cached", "computed", "evicted blocks, states", "audit", "seconds", title=title
    )
    for one in passes:
        counted = [one.counters[name] for name in COUNTERS]
        table.add_row(
            one.name,
            str(one.wrong),
            str(one.prompt_tokens),
            f"{one.cached_tokens / one.prompt_tokens:.0%}",
            str(counted[0]),
            f"{counted[2]}, {counted[3]}",
            str(counted[4]),
            str(one.seconds),
        )
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint directory; default: the shipped one")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--speculation", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--longest", type=int, default=600, help="words of a prompt")
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--snapshot-tokens", type=int, default=128)
    parser.add_argument("--chunk-policy", choices=("soft", "strict"), default="soft")
    parser.add_argument("--kv-blocks", type=int, help="a small pool, to see evictions")
    parser.add_argument("--policies", help="module:attribute, for the workers with a cache")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.model = resolve_model(args.model)
    return args


if __name__ == "__main__":
    asyncio.run(main())
