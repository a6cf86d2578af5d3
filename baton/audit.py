"""``baton audit``: what a running cluster's state audit has found. Exit code 1 when it found anything, 2 when it couldn't be asked."""

from __future__ import annotations

import json
import textwrap
import time
from typing import Annotated, NoReturn

import httpx
import typer
from pydantic import ValidationError

from baton.audit_report import AuditReport, Entry, WorkerAudit
from baton.console import EXIT_FAILURE, EXIT_USAGE, counted, fail, harmless, out
from baton.local_server import Target

TIMEOUT_S = 10.0


def command(
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    report = _fetch(Target(url=url).running_url)
    if as_json:
        print(json.dumps(report.model_dump(), indent=2))
    else:
        _show(report)
    if report.found:
        raise typer.Exit(EXIT_FAILURE)


def _fetch(url: str) -> AuditReport:
    try:
        answer = httpx.get(f"{url}/audit", timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no answer from {url}: {error}", EXIT_USAGE)
    if answer.is_server_error:
        fail(f"{url} can't tell (GET /audit: HTTP {answer.status_code})", EXIT_USAGE)
    if answer.status_code != httpx.codes.OK:
        _not_a_baton(url, f"HTTP {answer.status_code}")
    try:
        return AuditReport.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        _not_a_baton(url, f"{place}: {first['msg']}" if place else first["msg"])


def _not_a_baton(url: str, why: str) -> NoReturn:
    fail(f"{url} is not a Baton server (GET /audit: {harmless(why)})", EXIT_USAGE)


def _show(report: AuditReport) -> None:
    """In blocks and not in a table: ids must be whole, and have no bound."""
    for worker in report.workers:
        _block(worker.worker_id, *_of_worker(worker))
    for entry in report.entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        _block(f"{when}  {entry.worker_id}", *_of_entry(entry))
    unlisted = report.found - len(report.entries)
    told = f", {unlisted} of them not listed: older ones" if unlisted > 0 else ""
    out.print(f"{counted(report.found, 'violation')}{told}", style="bold red" if report.found else "green")


def _of_worker(worker: WorkerAudit) -> tuple[str, ...]:
    counts = (counted(worker.published, "state") + " kept", counted(worker.hits, "hit"), counted(worker.violations, "violation"))
    deep = worker.deep
    if not any((deep.passed, deep.failed, deep.skipped, deep.errors)):
        return ", ".join(counts), "no hit was computed again"
    again = f"{counted(deep.passed + deep.failed, 'hit')} computed again: {deep.failed} different"
    return ", ".join(counts), f"{again}, largest difference {worker.largest_difference:.1e}; {deep.skipped + deep.errors} skipped"


def _of_entry(entry: Entry) -> tuple[str, ...]:
    return (
        entry.told,
        f"request {entry.request_id}, step {entry.step}",
        entry.detail,
        entry.story,
    )


def _block(title: str, *lines: str) -> None:
    out.print(harmless(title), style="bold", markup=False)
    for line in filter(None, lines):
        out.print(_wrapped(harmless(line)), markup=False)
    out.print()


def _wrapped(line: str) -> str:
    """To the terminal's width, between words only."""
    return textwrap.fill(line, out.width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
