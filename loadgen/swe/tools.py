"""What an agent can do with an instance's repository. Every answer is a short text; what can't be done is answered with ``error:``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from loadgen.swe.instance import HIDDEN_TEST, VISIBLE_TEST, Instance
from loadgen.swe.outcome import Outcome
from loadgen.swe.sandbox import run_tests

SYSTEM_PROMPT = "You fix bugs. Use the tools, then submit."
RunTests = Callable[[Mapping[str, str], str], Outcome]


def _tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {argument: {"type": "string"} for argument in arguments}}
    if arguments:
        parameters["required"] = list(arguments)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("list", "List files."),
    _tool("read", "Read a file.", "path"),
    _tool("replace", "Replace text that occurs once.", "path", "old", "new"),
    _tool("test", "Run tests."),
    _tool("submit", "Finish."),
]
"""OpenAI's form. Terse: they are in every prompt."""
_ARGUMENTS = {tool["function"]["name"]: tuple(tool["function"]["parameters"]["properties"]) for tool in TOOLS}


class ToolError(Exception):
    """What the agent asked for can't be done; it is told so."""


class Workspace:
    """A repository in memory; tests run on a copy on disk."""

    def __init__(self, files: Mapping[str, str], run: RunTests = run_tests) -> None:
        self.files = dict(files)
        self.submitted = False
        self._run_tests = run

    def run(self, name: str, arguments: str) -> str:
        """Answer one call. ``arguments``: JSON, as a model wrote it. Blocks while tests run."""
        try:
            return self._call(name, _parse(name, arguments))
        except ToolError as error:
            return f"error: {error}"

    def resolved(self, instance: Instance) -> bool:
        """The hidden test passes. Blocks."""
        path, text = instance.hidden_test
        return self._run_tests(self.files | {path: text}, HIDDEN_TEST).passed

    def _call(self, name: str, given: dict[str, str]) -> str:
        match name:
            case "list":
                return "\n".join(sorted(self.files))
            case "read":
                return self._read(given["path"])
            case "replace":
                return self._replace(given["path"], given["old"], given["new"])
            case "test":
                return self._run_tests(self.files, VISIBLE_TEST).text()
            case _:
                self.submitted = True
                return "submitted"

    def _read(self, path: str) -> str:
        try:
            return self.files[path]
        except KeyError:
            raise ToolError(f"there is no file {path!r}") from None

    def _replace(self, path: str, old: str, new: str) -> str:
        text = self._read(path)
        times = text.count(old) if old else 0
        if times != 1:
            raise ToolError(f"old occurs {times} times in {path}, not once")
        self.files[path] = text.replace(old, new)
        return "replaced"


def _parse(name: str, arguments: str) -> dict[str, str]:
    """Raises ToolError."""
    if name not in _ARGUMENTS:
        raise ToolError(f"there is no tool {name!r}")
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        raise ToolError("the arguments are not JSON") from None
    if not isinstance(given, dict):
        raise ToolError("the arguments are not an object")
    for argument in _ARGUMENTS[name]:
        if not isinstance(given.get(argument), str):
            raise ToolError(f"{name} needs {argument}, a string")
    return given
