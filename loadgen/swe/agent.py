"""The agent loop: ask, run the tools that were called, tell their results, until the model says that it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from loadgen.answer import Answer
from loadgen.client import AskError, Client
from loadgen.record import Session, turn_of
from loadgen.swe.expert import opening
from loadgen.swe.instance import Instance
from loadgen.swe.sandbox import run_tests
from loadgen.swe.tools import TOOLS, RunTests, Workspace
from loadgen.symptoms import symptoms

MAX_TURNS = 16
OnTurn = Callable[[Answer, Sequence[dict[str, Any]]], None]
"""Told each answer, with the results of its calls."""
RETRY_AFTER_S = 1.0
GO_ON = "Call a tool. When the bug is fixed, call submit."
"""For answers that call nothing before anything was submitted."""


async def fix(
    instance: Instance,
    client: Client,
    session: Session,
    began_at: float,
    max_turns: int = MAX_TURNS,
    retries: int = 0,
    run_tests: RunTests = run_tests,
    on_turn: OnTurn = lambda answer, results: None,
) -> None:
    """Fill ``session`` turn by turn. A call that can't be carried out is answered with an error and the session goes on; an answer
    that doesn't come after ``retries`` more tries ends it. Resolved: the hidden test passes on what the session left behind."""
    workspace = Workspace(instance.files, run_tests)
    session.messages += opening(instance)
    for _ in range(max_turns):
        answer = await _ask(client, session, workspace, instance.seed, began_at, retries)
        if answer is None:
            break
        session.messages.append(answer.message())
        results = await asyncio.to_thread(_results, workspace, answer)
        on_turn(answer, results)
        session.messages += results
        if results:
            continue
        if workspace.submitted:
            break
        session.messages.append({"role": "user", "content": GO_ON})
    session.submitted = workspace.submitted
    session.resolved = await asyncio.to_thread(workspace.resolved, instance)


async def _ask(client: Client, session: Session, workspace: Workspace, seed: int, began_at: float, retries: int) -> Answer | None:
    """Each try is a turn of the session. None: the last one failed too."""
    for left in range(retries, -1, -1):
        try:
            answer = await client.chat(session.messages, TOOLS, seed=seed)
        except AskError as error:
            session.turns.append(turn_of(error.answer, began_at, failure=error.kind))
            await asyncio.sleep(RETRY_AFTER_S if left else 0)
            continue
        session.turns.append(turn_of(answer, began_at, symptoms(answer, expects_call=not workspace.submitted)))
        return answer
    return None


def _results(workspace: Workspace, answer: Answer) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.call_id, "content": workspace.run(call.name, call.arguments)} for call in answer.calls]
