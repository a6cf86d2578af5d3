"""What ``baton demo`` shows: the bug, each turn with its hand-off and drafts, and how it came out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from baton.console import baton_command, harmless, out
from loadgen.answer import Answer, Call
from loadgen.record import Session
from loadgen.swe.instance import Instance

INDENT = "     "
MAX_LINES = 40
"""Of one tool's output."""


def show_instance(instance: Instance) -> None:
    out.print("[bold]2.[/bold] A repository with a bug in it:")
    width = max(len(path) for path in instance.files)
    for path, text in sorted(instance.files.items()):
        tests = text.count("def test_")
        held = f"{tests} tests" if tests else f"{text.count('def ')} functions"
        out.print(f"   [cyan]{path:{width}}[/cyan]  {held}")
    out.print(f"   Issue: [italic]{instance.issue}[/italic]\n")


def show_turn(answer: Answer, results: Sequence[dict[str, Any]]) -> None:
    if answer.text.strip():
        _print(answer.text.strip(), "   ", "magenta")
    for call, result in zip(answer.calls, results, strict=True):
        _show_call(call)
        text = str(result["content"])
        _print(text, INDENT, _style_of(text))
    out.print(f"{INDENT}{' · '.join(_figures(answer))}\n", style="dim")


def show_verdict(session: Session) -> None:
    out.print("[bold]4.[/bold] The hidden test, which the agent never saw: ", end="")
    if session.resolved:
        out.print("[bold green]it passes, the bug is fixed[/bold green]\n")
    else:
        told = "" if session.submitted else f"; nothing was submitted in {len(session.turns)} turns"
        out.print(f"[bold red]it fails, the bug is still there[/bold red]{told}\n")


def show_next(seed: int) -> None:
    baton = baton_command()
    out.print("Next:")
    for command, about in (
        (f"{baton} demo --seed {seed + 1}", "another bug"),
        (f"{baton} bench swe --instances 20", "how many of 20 it fixes, and how fast"),
        (f"{baton} chat", "talk to the model yourself"),
        ("make serve", "keep a cluster running on port 8000, for any OpenAI client"),
    ):
        out.print(f"   [bold]{command:44}[/bold] {about}")


def _show_call(call: Call) -> None:
    """An edit as what it changes, everything else as name and arguments."""
    arguments = _arguments(call)
    if arguments is None:
        _print(f"→ {call.name} {call.arguments}", "   ", "bold yellow")
        return
    edit = [arguments.pop(key, None) for key in ("old", "new")] if call.name == "replace" else [None, None]
    _print(" ".join(["→", call.name, *map(str, arguments.values())]), "   ", "bold yellow")
    for text, mark, style in zip(edit, "-+", ("red", "green"), strict=True):
        if text is not None:
            _print("\n".join(f"{mark} {line}" for line in str(text).splitlines()), INDENT, style)


def _arguments(call: Call) -> dict[str, Any] | None:
    """None: they aren't an object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _style_of(result: str) -> str:
    if result.startswith(("FAILED", "error:")):
        return "red"
    return "green" if result.startswith("OK") else ""


def _print(text: str, indent: str, style: str) -> None:
    lines = harmless(text).splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"… {len(lines) - MAX_LINES} lines more"]
    for line in lines:
        out.print(f"{indent}{line}", markup=False, style=style)


def _figures(answer: Answer) -> Iterator[str]:
    """What was handed over, and what the drafts brought. ``answer`` is of a server that tells its timings."""
    timings, prompt_tokens = answer.timings, answer.usage["prompt_tokens"]
    if timings["transfer_bytes"]:
        kib, late_ms = timings["transfer_bytes"] / 1024, timings["transfer_ms"]
        yield f"handed over: h({prompt_tokens - 1}) and its KV, {kib:.0f} KiB, in D {late_ms:.1f} ms after prefill"
    else:
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        yield f"{cached} of {prompt_tokens} prompt tokens kept from the turns before, the rest computed by D itself"
    yield f"first token {timings['first_token_ms']:.0f} ms"
    steps, accepted, proposed = timings["steps"], timings["accepted_drafts"], timings["proposed_drafts"]
    told = f"{len(answer.token_ids)} tokens in {steps} steps"
    yield f"{told}, {accepted / (steps - 1):.1f} drafts accepted each" if proposed and steps > 1 else told
