"""The scripted agent: what a perfect model would say. Its policy depends on nothing but what it has seen so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loadgen.swe.instance import Instance
from loadgen.swe.outcome import Outcome
from loadgen.swe.tools import SYSTEM_PROMPT, RunTests, Workspace

Message = dict[str, Any]


def opening(instance: Instance) -> list[Message]:
    """What every session begins with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": instance.issue}]


def expert_calls(instance: Instance) -> list[tuple[str, dict[str, str]]]:
    """Name and arguments of each call, in order."""
    bug = instance.bug
    look: list[tuple[str, dict[str, str]]] = [] if instance.names_module else [("list", {})]
    fix = {"path": bug.path, "old": bug.broken, "new": bug.fixed}
    return [*look, ("test", {}), ("read", {"path": bug.path, "function": bug.function}), ("replace", fix), ("test", {}), ("submit", {})]


def call_message(name: str, arguments: Mapping[str, str], call_id: str = "call_0") -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def closing(instance: Instance) -> Message:
    return {"role": "assistant", "content": f"Fixed {instance.bug.function} in {instance.bug.path}."}


def expert_messages(instance: Instance, run_tests: RunTests | None = None) -> list[Message]:
    """The whole conversation, in OpenAI's form. Without ``run_tests`` nothing is executed: the outcomes of an instance are known."""
    workspace = Workspace(instance.files, run_tests or foretell(instance))
    messages = opening(instance)
    for number, (name, arguments) in enumerate(expert_calls(instance)):
        call_id = f"call_{number}"
        messages.append(call_message(name, arguments, call_id))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": workspace.run(name, json.dumps(arguments))})
    return [*messages, closing(instance)]


def foretell(instance: Instance) -> RunTests:
    """Outcomes without running anything: any change of the broken module counts as the fix."""

    def run(files: Mapping[str, str], _: str) -> Outcome:
        broken = files[instance.bug.path] == instance.files[instance.bug.path]
        return instance.outcome if broken else Outcome(instance.outcome.num_tests, ())

    return run
