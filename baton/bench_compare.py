"""``baton bench compare``: two reports of a load, made with ``--json --tokens``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.console import EXIT_FAILURE, errors_as_exit, out
from loadgen.compare import compare


def command(
    one: Annotated[Path, typer.Argument(help="What a load command printed with --json --tokens.")],
    other: Annotated[Path, typer.Argument(help="The same of another server.")],
) -> None:
    with errors_as_exit():
        result = compare(_read(one), _read(other))
    if result.differences:
        told = f"{len(result.differences)} of {result.sessions} sessions; the first: {result.differences[0]}"
        out.print(f"[bold red]different[/bold red]: {told}")
        sys.exit(EXIT_FAILURE)
    out.print(f"[bold green]the same[/bold green]: {result.sessions} sessions, {result.tokens} tokens in {result.turns} turns")


def _read(path: Path) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report")
    return report
