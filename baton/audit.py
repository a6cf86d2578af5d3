"""``baton audit``: what a running cluster's state audit has found. Exit code 1 when it found anything."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from baton.console import EXIT_FAILURE, fail, out
from loadgen.sse import error_text

TIMEOUT_S = 10.0


def command(
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    report = _fetch(url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    if report["violations"] or any(worker["violations"] for worker in report["workers"]):
        raise typer.Exit(EXIT_FAILURE)


def _fetch(url: str) -> dict[str, Any]:
    try:
        answer = httpx.get(f"{url}/audit", timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        fail(f"no answer from {url}: {error}")
    if answer.status_code != httpx.codes.OK:
        fail(f"{url}: {error_text(answer.content, answer.status_code)}")
    report: dict[str, Any] = answer.json()
    return report


def _show(report: dict[str, Any]) -> None:
    out.print(_workers(report["workers"]))
    if report["entries"]:
        out.print()
        out.print(_entries(report["entries"]))
    more = report["violations"] - len(report["entries"])
    told = f", {more} older ones not shown" if more > 0 else ""
    style = "bold red" if report["violations"] else "green"
    out.print(f"\n[{style}]{report['violations']} violations[/{style}] since the router started{told}")


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table("worker", title="state audit", title_justify="left", box=None, padding=(0, 2))
    for name in ("published", "hits", "violations", "recomputed", "equal", "different", "skipped", "largest difference"):
        table.add_column(name, justify="right")
    for worker in workers:
        deep = worker["deep"]
        numbers = (
            worker["published"],
            worker["hits"],
            worker["violations"],
            deep["passed"] + deep["failed"],
            deep["passed"],
            deep["failed"],
        )
        skipped = deep["skipped"] + deep["errors"]
        table.add_row(worker["worker_id"], *map(str, numbers), str(skipped), f"{worker['largest_difference']:.1e}")
    return table


def _entries(entries: list[dict[str, Any]]) -> Table:
    table = Table("time", "worker", "found at", title="violations", title_justify="left", box=None, padding=(0, 2))
    for name in ("claimed", "held", "step"):
        table.add_column(name, justify="right")
    table.add_column("request")
    table.add_column("detail")
    for entry in entries:
        at = time.strftime("%H:%M:%S", time.localtime(entry["at"]))
        held = "?" if entry["held"] is None else str(entry["held"])
        numbers = (str(entry["claimed"]), held, str(entry["step"]))
        table.add_row(at, entry["worker_id"], entry["purpose"], *numbers, entry["request_id"], entry["detail"])
    return table
