"""``baton probe``: looks inside the engine at the states themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from baton.console import EXIT_FAILURE, err, errors_as_exit, out
from baton.models import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.probe import Lane, PartDifference

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return"
ABOUT = {
    "conv": "conv window",
    "ssm": "matrix state",
    "hidden": "hidden tail",
    "kv": "attention KV",
    "mtp_kv": "MTP's KV",
}


@app.callback()
def _group() -> None:
    pass


@app.command("tail", help="What a prompt's last token leaves behind when it is padded with K placeholders: three ways from one state.")
def tail(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the shipped model.", show_default=False)] = None,
    prompt: Annotated[str | None, typer.Option(help="Text; its last token is the tail.", show_default=False)] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids instead of text: 5,17,42.", show_default=False)] = None,
    speculation: Annotated[int, typer.Option(min=1, max=7, help="K, the number of placeholders.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens to compare.")] = 24,
    kernels: Annotated[str, typer.Option(help="auto, native, torch or reference.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    with errors_as_exit():
        path = resolve_model(model)
        from engine.config import EngineConfig
        from engine.core import EngineCore
        from engine.probe import probe_tail
        from engine.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(path)
        ids = _token_ids(prompt, tokens, tokenizer)
        core = EngineCore(EngineConfig(model=path, kernels=kernels, max_running=1))  # type: ignore[arg-type]  # it checks the name
        lanes = probe_tail(core.loaded, ids, speculation=speculation, max_tokens=max_tokens)
    if as_json:
        print(json.dumps(_report(path, ids, speculation, lanes), indent=2))
    else:
        _show(len(ids), speculation, lanes, tokenizer)
    if not lanes[1].same:
        err.print("[bold red]the padded tail of ours differs from one-token decode[/bold red]")
        raise typer.Exit(EXIT_FAILURE)


def _token_ids(prompt: str | None, tokens: str | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    from engine.prompts import as_token_ids

    if tokens is None:
        return as_token_ids(PROMPT if prompt is None else prompt, tokenizer)[0]
    if prompt is not None:
        raise ValueError("--prompt and --tokens exclude each other")
    try:
        return tuple(int(token) for token in tokens.split(","))
    except ValueError:
        raise ValueError(f"--tokens={tokens!r}: not token ids like 5,17,42") from None


def _report(model: Path, ids: Sequence[int], speculation: int, lanes: Sequence[Lane]) -> dict[str, Any]:
    told = [asdict(lane) | {"first_other_token": _first_other(lanes[0], lane)} for lane in lanes]
    return {"model": str(model), "prompt_tokens": len(ids), "speculation": speculation, "lanes": told}


def _show(num_tokens: int, speculation: int, lanes: Sequence[Lane], tokenizer: Tokenizer | None) -> None:
    truth, ours, fault = lanes
    out.print(f"A prompt of N = {num_tokens} tokens; its last one padded with K = {speculation} placeholders. Largest differences from")
    out.print(f"{truth.name}, after N tokens and after N+1:\n")
    table = Table(box=None, padding=(0, 2))
    table.add_column("part", no_wrap=True)
    for column in ("largest value", "ours, N", "N+1", "as prefill, N", "N+1"):
        table.add_column(column, justify="right")
    for same, other in zip(ours.differences, fault.differences, strict=True):
        figures = (same.after_tail, same.after_next, other.after_tail, other.after_next)
        table.add_row(_title(same), f"{same.scale:.3g}", *(_figure(value) for value in figures))
    out.print(table)
    out.print("\nNext tokens:")
    for lane in lanes:
        first = _first_other(truth, lane)
        end = "the same" if first is None else f"token {first + 1} is the first that differs"
        out.print(f"  {lane.name}{'' if lane is truth else f' ({end})'}:")
        out.print(
            f"    {' '.join(map(str, lane.token_ids)) if tokenizer is None else repr(tokenizer.decode(lane.token_ids))}", markup=False
        )
    verdict = "[bold green]bit for bit one-token decode[/bold green]" if ours.same else "[bold red]NOT one-token decode[/bold red]"
    out.print(f"\n{ours.name}: {verdict}; {fault.name}: {'the same' if fault.same else 'another state'}")


def _title(difference: PartDifference) -> str:
    kind, _, layer = difference.part.partition(".")
    return f"{ABOUT[kind]} {layer}".rstrip()


def _figure(value: float) -> str:
    return "0" if value == 0 else f"[red]{value:.3g}[/red]"


def _first_other(truth: Lane, lane: Lane) -> int | None:
    pairs = zip(truth.token_ids, lane.token_ids, strict=True)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
