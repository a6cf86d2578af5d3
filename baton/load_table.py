"""A load's report as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from baton.audit_report import AuditReport
from baton.console import counted

Row = tuple[str, str]


def load_table(title: str, told: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in (*_scores(told), *_sessions(told), *_latencies(told), *_work(told), *_audit(told)):
        table.add_row(name, value)
    return table


def _scores(told: Mapping[str, Any]) -> Iterator[Row]:
    if not told["instances"]:
        return
    low, high = told["accuracy_95"]
    yield "resolved", f"[bold]{told['resolved']} / {told['instances']}[/bold]"
    yield "accuracy", f"[bold]{_percent(told['accuracy'])}[/bold]  (95 %: {_percent(low)} .. {_percent(high)})"
    for kind, counts in told["by_kind"].items():
        yield f"  {kind}", f"{counts['resolved']} / {counts['instances']}"


def _sessions(told: Mapping[str, Any]) -> Iterator[Row]:
    ended, asked = len(told["sessions"]), told["sessions_asked"]
    stopped = f" of {asked}, stopped" if told["interrupted"] else ""
    yield "sessions", f"{ended}{stopped} in {told['duration_s']:.1f} s, {told['requests']} requests"
    yield "symptoms", _counts(told["symptoms"])
    yield "failures", _counts(told["failures"])


def _latencies(told: Mapping[str, Any]) -> Iterator[Row]:
    for key, name in (("ttft_ms", "time to first token"), ("inter_token_ms", "between tokens"), ("per_token_ms", "per token")):
        if spread := told[key]:
            yield name, f"p50 {spread['p50']:.1f} ms · p99 {spread['p99']:.1f} ms · max {spread['max']:.1f} ms"
    if goodput := told["goodput"]:
        bounds = " and ".join(f"{name[:-3]} {bound:g} ms" for name, bound in goodput["slo"].items() if bound is not None)
        yield "goodput", f"{goodput['per_s']:.2f} requests/s, {goodput['good']} of {goodput['requests']} within {bounds}"


def _work(told: Mapping[str, Any]) -> Iterator[Row]:
    yield "prompt tokens", f"{told['prompt_tokens']}, {told['cached_tokens']} of them cached"
    yield "output tokens", f"{told['completion_tokens']}, {told['output_tokens_per_s']:.1f} per second"
    if told["tokens_per_step"] is not None:
        drafts = f"{told['accepted_drafts']} of {told['proposed_drafts']} drafts accepted"
        yield "tokens per step with drafts", f"[bold]{told['tokens_per_step']:.2f}[/bold]  ({drafts})"


def _audit(told: Mapping[str, Any]) -> Iterator[Row]:
    if "audit" not in told:
        return
    audit = AuditReport.model_validate(told["audit"])
    kept = counted(sum(worker.published for worker in audit.workers), "state")
    hits = counted(sum(worker.hits for worker in audit.workers), "hit")
    yield "state audit", f"[bold {'red' if audit.found else 'green'}]{counted(audit.found, 'violation')}[/], {kept} kept, {hits}"
    for entry in audit.entries[:3]:
        yield "", f"{entry.worker_id}: {entry.told}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
