"""What the load commands share: run sessions with a progress bar, stop at Ctrl-C, and tell what there is."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.console import EXIT_FAILURE, EXIT_STOPPED, err, errors_as_exit, out
from baton.load_table import load_table
from baton.local_server import Target
from baton.reproduce import REPRODUCTIONS
from baton.up import Plan
from loadgen.client import Client, find_server, http_client
from loadgen.plot import check_plot, plot
from loadgen.record import Session
from loadgen.report import Slo, report
from loadgen.run import Arrival, Run, Work

MakeWork = Callable[[Client], Sequence[tuple[Session, Work]]]
Ask = Callable[[Client], Awaitable[dict[str, Any]]]


async def _nothing(client: Client) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run from the command line. ``settings``: for the report, what ``arrival`` and ``request`` don't say."""

    title: str
    target: Target
    arrival: Arrival
    request: dict[str, Any]
    """Fields of every request."""
    timeout_s: float
    sessions: int
    make_work: MakeWork
    settings: dict[str, Any]
    on_session: Callable[[Session], None] = lambda _: None
    ask_afterwards: Ask = _nothing
    """More for the report, of the server that has done it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    as_json: bool = False
    plot: Path | None = None
    slo: Slo = field(default_factory=Slo)
    tokens: bool = False


@dataclass(slots=True)
class _Outcome:
    run: Run = field(default_factory=Run)
    server: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False


def drive(load: Load, output: Output) -> NoReturn:
    """Exit code 0; 1 when no request was answered; 130 after Ctrl-C, with what there is."""
    outcome = _Outcome()
    with errors_as_exit():
        if output.plot:
            check_plot(output.plot)
        plan = load.target.check()
        asyncio.run(_until_stopped(load, plan, outcome))
        told = _report(load, output, outcome)
        if output.as_json:
            print(json.dumps(told))
        else:
            out.print(load_table(load.title, told))
        if output.plot:
            _plot(output.plot, load, outcome)
    turns = outcome.run.turns
    all_failed = bool(turns) and all(turn.failure for turn in turns)
    sys.exit(EXIT_STOPPED if outcome.interrupted else EXIT_FAILURE if all_failed else 0)


async def _until_stopped(load: Load, plan: Plan | None, outcome: _Outcome) -> None:
    task = asyncio.create_task(_load(load, plan, outcome))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        outcome.interrupted = True


async def _load(load: Load, plan: Plan | None, outcome: _Outcome) -> None:
    if plan is not None:
        err.print("[dim]starting a cluster for this load; --url takes one that runs already …[/dim]")
        if fault := load.target.local.reproduce:
            err.print(f"[bold red]with the fault {fault}[/bold red]: {REPRODUCTIONS[fault].about}")
    async with load.target.serve(plan) as url, http_client(load.target.api_key()) as http:
        server = await find_server(http, url, load.target.model_name)
        outcome.server = {"model": server.model, "owned_by": server.owner}
        client = Client(http, server, load.request, load.timeout_s)
        with _progress() as progress:
            bar = progress.add_task(load.title, total=load.sessions, told="")

            def on_end(session: Session) -> None:
                load.on_session(session)
                progress.update(bar, advance=1, told=_so_far(outcome.run.sessions))

            await outcome.run.go(load.make_work(client), load.arrival, on_end)
        outcome.more = await load.ask_afterwards(client)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[told]}"))
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _so_far(sessions: Sequence[Session]) -> str:
    known = [session.resolved for session in sessions if session.resolved is not None]
    return f"{sum(known)} of {len(known)} resolved" if known else ""


def _report(load: Load, output: Output, outcome: _Outcome) -> dict[str, Any]:
    settings = load.target.described() | outcome.server | load.arrival.described() | load.request | load.settings
    told = report(outcome.run, settings, output.slo, asked=load.sessions, interrupted=outcome.interrupted, with_tokens=output.tokens)
    return {"load": load.title} | told | outcome.more


def _plot(path: Path, load: Load, outcome: _Outcome) -> None:
    try:
        plot(path, outcome.run.turns, f"{load.title}: {outcome.server.get('model', '')}")
    except OSError as error:
        raise ValueError(f"plot={path} can't be written: {error}") from error
