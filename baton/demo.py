"""``baton demo``: a cluster of three processes on the shipped model, one streamed answer, and the same answer from one process."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster import ClusterError, LocalCluster, free_port
from baton.console import baton_command, err, errors_as_exit, fail, out
from baton.models import SPECULATION, resolve_model
from baton.up import Plan, plan_cluster
from loadgen.sse import TIMEOUT, ServerError, stream_json
from protocol.config import UpSettings
from protocol.sampling import SamplingParams

PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: list[int]
    token_ids: list[int]
    first_token_s: float
    total_s: float


def command(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the shipped model.", show_default=False)] = None,
    prompt: Annotated[str, typer.Option(help="What to continue.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = MAX_TOKENS,
    speculation: Annotated[int, typer.Option(min=0, max=7, help="K, draft tokens per step.")] = SPECULATION,
) -> None:
    with errors_as_exit():
        path = resolve_model(model)
        settings = UpSettings(model=path, host="127.0.0.1", port=free_port(), prefill=1, decode=1, speculation=speculation)
        plan = plan_cluster(settings, None, os.environ)
    try:
        answer = asyncio.run(_run(plan, prompt, max_tokens, speculation))
    except (ClusterError, ServerError) as error:
        fail(str(error))
    _compare(path, answer, max_tokens)


async def _run(plan: Plan, prompt: str, max_tokens: int, speculation: int) -> Answer:
    log: deque[str] = deque(maxlen=200)
    url = plan.url
    out.print("[bold]1.[/bold] Starting a router, a prefill worker and a decode worker, each a process of its own …")
    async with LocalCluster(plan.specs, url, lambda name, line: log.append(f"{name}: {line}")) as cluster:
        try:
            await cluster.ready(timeout_s=120.0)
        except ClusterError:
            err.print("\n".join(log), markup=False)
            raise
        out.print("   " + ", ".join(f"{name} (pid {pid})" for name, pid in cluster.pids().items()))
        out.print(f"[bold]2.[/bold] One request over HTTP; speculation with K = {speculation}:\n")
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            answer = await _ask(client, url, prompt, max_tokens)
            await _tell_handoff(client, url, answer)
    return answer


async def _ask(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> Answer:
    name = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    started, first = time.monotonic(), None
    token_ids: list[int] = []
    out.print(prompt, markup=False, end="", style="dim")
    async for event in stream_json(client, f"{url}/v1/completions", body):
        first = first or time.monotonic()
        for choice in event["choices"]:
            token_ids += choice.get("token_ids") or []
            out.print(choice["text"], markup=False, end="")
    out.print("\n")
    ended = time.monotonic()
    prompt_ids = (await client.post(f"{url}/tokenize", json={"prompt": prompt})).json()["tokens"]
    return Answer(prompt_ids, token_ids, (first or ended) - started, ended - started)


async def _tell_handoff(client: httpx.AsyncClient, url: str, answer: Answer) -> None:
    totals = _metrics((await client.get(f"{url}/metrics")).text)
    moved = totals["baton_transfer_bytes_total"]
    tail_ms = 1000 * totals["baton_ttft_part_seconds_sum transfer"]
    accepted, proposed = totals["baton_draft_tokens_total accepted"], totals["baton_draft_tokens_total proposed"]
    out.print("[bold]3.[/bold] What the prefill worker handed over to the decode worker:")
    out.print(
        f"   h({len(answer.prompt_ids) - 1}) and its KV blocks: {moved / 1024:.0f} KiB over UCX, in D {tail_ms:.1f} ms after prefill ended"
    )
    out.print(
        f"   first token after {1000 * answer.first_token_s:.0f} ms, {len(answer.token_ids)} tokens in {1000 * answer.total_s:.0f} ms"
    )
    out.print(f"   drafts accepted: {accepted:.0f} of {proposed:.0f}")


def _metrics(text: str) -> dict[str, float]:
    """Value by sample name and label values, for instance 'baton_draft_tokens_total accepted'."""
    families = text_string_to_metric_families(text)
    return {" ".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}


def _compare(path: Path, answer: Answer, max_tokens: int) -> None:
    from engine import Engine

    out.print("[bold]4.[/bold] The same prompt in one plain process, without split and speculation:")
    with Engine(path, speculation=0) as engine:
        alone = engine.generate(answer.prompt_ids, SamplingParams(max_tokens=max_tokens))[0]
    if list(alone.token_ids) != answer.token_ids:
        fail(f"the tokens differ: cluster {answer.token_ids}, one process {list(alone.token_ids)}")
    out.print(f"   [bold green]the same {len(answer.token_ids)} tokens[/bold green]\n")
    out.print(
        f"Next: [bold]make serve[/bold], then [bold]{baton_command()} chat[/bold] in another terminal, or any OpenAI client on port 8000."
    )
