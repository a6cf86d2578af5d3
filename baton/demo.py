"""``baton demo``: a cluster of three processes on the shipped model in which an agent fixes a bug, and the same tokens from one process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from baton.cluster import ClusterError
from baton.console import EXIT_FAILURE, complain, errors_as_exit, fail, out
from baton.demo_show import show_instance, show_next, show_turn, show_verdict
from baton.models import default_speculation, resolve_model
from baton.own_cluster import own_cluster, plan_own_cluster
from baton.up import Plan
from loadgen.client import Client, find_server, http_client
from loadgen.record import Session
from loadgen.sse import ServerError
from loadgen.swe.agent import MAX_TURNS, fix
from loadgen.swe.instance import FIRST_TRAINING_SEED, Instance, make_instance
from loadgen.swe.tools import TOOLS
from protocol.sampling import SamplingParams

SEED = 28
"""Of a bug that the shipped model has never seen."""
MAX_TOKENS = 256
TURN_TIMEOUT_S = 120.0

Asked = tuple[list[int], list[int]]
"""One request: the prompt's token ids and the answer's."""


def command(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the shipped model.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, max=FIRST_TRAINING_SEED - 1, help="Which bug.")] = SEED,
    speculation: Annotated[int | None, typer.Option(help="K, draft tokens per step, 0..7.", show_default=False)] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Answers of the model, at most.")] = MAX_TURNS,
) -> None:
    with errors_as_exit():
        path = resolve_model(model)
        k = default_speculation(path) if speculation is None else speculation
        plan = plan_own_cluster(path, k)
    try:
        session, asked = asyncio.run(_run(plan, make_instance(seed), k, max_turns))
    except (ClusterError, ServerError) as error:
        fail(str(error))
    raise typer.Exit(conclude(path, seed, session, asked))


def conclude(path: Path, seed: int, session: Session, asked: list[Asked]) -> int:
    """Tell how it came out. The exit code: 0 only when the bug is fixed and one process gives the same tokens."""
    if session.failure:
        complain(f"a request failed: {session.failure}")
        return EXIT_FAILURE
    show_verdict(session)
    differing = _compare(path, asked)
    if differing:
        complain(differing)
    if differing or not session.resolved:
        return EXIT_FAILURE
    show_next(seed)
    return 0


async def _run(plan: Plan, instance: Instance, k: int, max_turns: int) -> tuple[Session, list[Asked]]:
    """Raises ClusterError and ServerError. A request that fails stands in the session."""
    out.print("[bold]1.[/bold] Starting a router, a prefill worker and a decode worker, each a process of its own …")
    async with own_cluster(plan) as cluster, http_client(None) as http:
        out.print("   " + ", ".join(f"{name} (pid {pid})" for name, pid in cluster.pids().items()))
        server = await find_server(http, plan.url)
        client = Client(http, server, {"temperature": 0, "max_tokens": MAX_TOKENS}, TURN_TIMEOUT_S)
        show_instance(instance)
        out.print(f"[bold]3.[/bold] An agent on the model fixes it. Each turn is one request; speculation with K = {k}:")
        session = Session(name=str(instance.seed), kind=instance.kind)
        await fix(instance, client, session, time.monotonic(), max_turns, on_turn=show_turn)
        return session, await _asked(http, plan.url, session)


async def _asked(http: httpx.AsyncClient, url: str, session: Session) -> list[Asked]:
    """What each turn's request was, in tokens."""
    answered = [place for place, message in enumerate(session.messages) if message["role"] == "assistant"]
    asked = []
    for place, turn in zip(answered, session.turns, strict=False):  # the last turn may have failed
        body: dict[str, Any] = {"messages": session.messages[:place], "tools": TOOLS}
        prompt = (await http.post(f"{url}/tokenize", json=body)).json()["tokens"]
        asked.append((prompt, list(turn.token_ids)))
    return asked


def _compare(path: Path, asked: list[Asked]) -> str | None:
    """How the tokens differ from those of one process, None when they are the same."""
    from engine import Engine

    out.print(f"[bold]5.[/bold] The same {len(asked)} prompts in one plain process, without split and speculation:")
    with Engine(path, speculation=0) as engine:
        alone = engine.generate([prompt for prompt, _ in asked], SamplingParams(max_tokens=MAX_TOKENS))
    for turn, ((_, token_ids), one) in enumerate(zip(asked, alone, strict=True), 1):
        if list(one.token_ids) != token_ids:
            return f"turn {turn} differs: the cluster's tokens are {token_ids}, one process's {list(one.token_ids)}"
    out.print(f"   [bold green]the same {sum(len(token_ids) for _, token_ids in asked)} tokens[/bold green]\n")
    return None
