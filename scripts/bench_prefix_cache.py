"""Time to the first token of a prompt whose beginning is cached, over that of a cold one of the same length, through the split.

    python -m scripts.bench_prefix_cache CHECKPOINT [--shared 1024 4096 16384] [--tail 32] [--runs 5] [--threads 2]

For each length of the shared beginning: cold (nothing like it was seen), same beginning (another tail of ``--tail`` tokens), same prompt
(all of it was seen), and cold again without cache for comparison. Prompts are random ids. One request at a time; the kinds take turns,
so that a slower machine slows all. Medians with the spread, and what was computed according to the usage.
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
from rich.console import Console
from rich.table import Table

from baton.cluster import LocalCluster, free_port
from baton.up import plan_cluster
from loadgen.sse import stream_json
from protocol.config import UpSettings

KINDS = ("without cache", "cold", "same beginning", "same prompt")


async def main() -> None:
    args = _arguments()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    results = []
    async with AsyncExitStack() as stack:
        cached, plain = await _start(stack, args, prefix_cache=True), await _start(stack, args, prefix_cache=False)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=600, trust_env=False))
        for shared in args.shared:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            computed: dict[str, list[int]] = {kind: [] for kind in KINDS}
            for run in range(-1, args.runs):
                draw = random.Random(1000 * shared + run)
                beginning, tail, other = ([draw.randrange(3, vocab_size) for _ in range(n)] for n in (shared, args.tail, args.tail))
                prompts = {"same beginning": [*beginning, *other]}
                for kind in KINDS:
                    url = plain if kind == "without cache" else cached
                    seconds, missing = await _ask(client, url, prompts.get(kind, [*beginning, *tail]))
                    if run >= 0:
                        times[kind].append(1000 * seconds)
                        computed[kind].append(missing)
            results.append({"shared": shared, "ms": times, "computed": computed})
    if args.json:
        print(json.dumps({"tail": args.tail, "threads": args.threads, "load_1min": os.getloadavg()[0], "results": results}))
    else:
        _show(results, args)


async def _start(stack: AsyncExitStack, args: argparse.Namespace, *, prefix_cache: bool) -> str:
    settings = UpSettings(
        model=args.model, port=free_port(), prefill=1, decode=1, threads=args.threads, speculation=0, prefix_cache=prefix_cache
    )
    plan = plan_cluster(settings, None, {})
    cluster = await stack.enter_async_context(LocalCluster(plan.specs, plan.url, lambda name, line: None))
    await cluster.ready()
    return plan.url


async def _ask(client: httpx.AsyncClient, url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that somebody computed."""
    options = {"include_usage": True}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream_options": options}
    usage: dict[str, Any] = {}
    started, seconds = time.perf_counter(), 0.0
    async for event in stream_json(client, f"{url}/v1/completions", body):
        seconds = seconds or time.perf_counter() - started
        usage = event.get("usage") or usage
    return seconds, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def _show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table("shared tokens", "prompt", "first token, ms", "over no cache", "tokens computed", title=f"tail of {args.tail} tokens")
    for result in results:
        base = statistics.median(result["ms"]["without cache"])
        for kind in KINDS:
            ms = result["ms"][kind]
            median = statistics.median(ms)
            spread = f"{median:.0f} ({min(ms):.0f} .. {max(ms):.0f})"
            table.add_row(
                str(result["shared"]), kind, spread, f"{median / base:.3f}", str(round(statistics.median(result["computed"][kind])))
            )
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory; scripts/make_random_checkpoint.py --positions makes long ones")
    parser.add_argument("--shared", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
