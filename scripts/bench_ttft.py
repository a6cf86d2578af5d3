"""Time to the first token of the split (one prefill, one decode worker) over that of one worker that does both.

    python scripts/bench_ttft.py CHECKPOINT [--prompt-tokens 2048] [--runs 7] [--threads 2] [--json]

Both clusters run at once, idle but for the one request that is measured, in turns, so that a slower machine slows both. Each
worker has ``--threads`` threads: with one request in flight P and D compute one after the other. Prompts are random ids,
new ones each time. Prints the medians, the spread, and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from baton.cluster import LocalCluster, free_port
from baton.up import plan_cluster
from loadgen.sse import stream_json
from protocol.config import UpSettings

SHAPES = {"split": 1, "one process": 0}
"""Prefill workers of each cluster."""


async def main() -> None:
    args = _arguments()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    times: dict[str, list[float]] = {name: [] for name in SHAPES}
    async with AsyncExitStack() as stack:
        urls = {name: await _start(stack, args, prefill) for name, prefill in SHAPES.items()}
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=120, trust_env=False))
        for run in range(-2, args.runs):
            numbers = random.Random(run)
            prompt = [numbers.randrange(3, vocab_size) for _ in range(args.prompt_tokens)]
            for name in sorted(urls, reverse=run % 2 == 0):
                seconds = await _first_token(client, urls[name], prompt)
                if run >= 0:
                    times[name].append(1000 * seconds)
    result = {name: {"median ms": statistics.median(t), "min ms": min(t), "max ms": max(t), "runs": len(t)} for name, t in times.items()}
    ratio = statistics.median(times["split"]) / statistics.median(times["one process"])
    told: dict[str, Any] = {"prompt_tokens": args.prompt_tokens, "threads": args.threads, "load_1min": os.getloadavg()[0]}
    told |= result | {"split / one process": round(ratio, 3)}
    print(json.dumps(told, indent=None if args.json else 2))


async def _start(stack: AsyncExitStack, args: argparse.Namespace, prefill: int) -> str:
    settings = UpSettings(model=args.model, port=free_port(), prefill=prefill, decode=1, threads=args.threads, prefix_cache=False)
    plan = plan_cluster(settings, None, {})
    cluster = await stack.enter_async_context(LocalCluster(plan.specs, plan.url, lambda name, line: None))
    await cluster.ready()
    return plan.url


async def _first_token(client: httpx.AsyncClient, url: str, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    async for _ in stream_json(client, f"{url}/v1/completions", body):
        return time.perf_counter() - started
    raise AssertionError("a stream without a token")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="on one line")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
