"""``baton bench``: figures of this machine, each with its spread and beside something real from the same run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from baton import bench_compare, bench_fewshot, bench_serve, bench_swe
from baton.console import err, errors_as_exit, out
from baton.models import resolve_model

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Model = Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the shipped model.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Runs = Annotated[int, typer.Option(min=1, help="Repeats; the median and the spread are told.")]
Batch = Annotated[int, typer.Option(min=1, help="Requests at once.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: all cores.", show_default=False)]


@app.command("handoff", help="Whole hand-offs between two processes, beside a plain socket and ucx_perftest.")
def handoff(
    runs: Runs = 7,
    run_blocks: Annotated[int, typer.Option(min=1, help="Adjacent blocks at both ends; 1: scattered.")] = 1,
    checksums: Annotated[bool, typer.Option(help="With checksums at both ends.")] = True,
    as_json: Json = False,
) -> None:
    from transfer.bench import bench
    from transfer.bench_peer import Sizes

    with errors_as_exit():
        err.print("[dim]52 MB per hand-off, in turns with the others …[/dim]")
        _show("handoff", asyncio.run(bench(Sizes(run_blocks=run_blocks, checksums=checksums), runs)), as_json)


@app.command("prefill", help="Prompt tokens per second, beside this machine's matmul peak.")
def prefill(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Length of each prompt.")] = 256,
    batch: Batch = 1,
    runs: Runs = 7,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    with errors_as_exit():
        path = resolve_model(model)
        from baton import measure

        result = measure.prefill(path, prompt_tokens=prompt_tokens, batch=batch, runs=runs, threads=threads)
        _show("prefill", result | {"machine": measure.machine()}, as_json)


@app.command("decode", help="Output tokens per second with and without speculation, and a verify step beside a one-row step.")
def decode(
    model: Model = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 64,
    batch: Batch = 1,
    runs: Runs = 7,
    threads: Threads = None,
    speculation: Annotated[int, typer.Option(min=0, max=7, help="K of the speculative run, when the checkpoint has MTP.")] = 5,
    as_json: Json = False,
) -> None:
    with errors_as_exit():
        path = resolve_model(model)
        from baton import measure

        result = measure.decode(path, new_tokens=new_tokens, batch=batch, runs=runs, threads=threads, speculation=speculation)
        _show("decode", result | {"machine": measure.machine()}, as_json)


app.command("swe", help="Agents that fix bugs with tools, and how many do: a score that falls when state is wrong.")(bench_swe.command)
app.command("serve", help="Plain prompts: random, from a file, or with the lengths of chats.")(bench_serve.command)
app.command("fewshot", help="Questions behind the same worked examples: a prefix cache's load, with the state audit's line.")(
    bench_fewshot.command
)
app.command("compare", help="Two reports of the same load: the same answers, token by token, and how many are others?")(
    bench_compare.command
)


def _show(title: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, default=_plain, indent=2))
        return
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for key, value in _flat(result):
        table.add_row(key, value)
    out.print(table)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key} · ") if isinstance(value, dict) else [(prefix + key, str(value))]
    return rows


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} in a result")
