"""What an agent can do with an instance's repository. Every answer is a short text; what can't be done is answered with ``error:``."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadgen.swe.instance import HIDDEN_TEST, VISIBLE_TEST, Instance
from loadgen.swe.outcome import Outcome
from loadgen.swe.sandbox import run_tests

SYSTEM_PROMPT = "You fix bugs. Use the tools, then submit."
RunTests = Callable[[Mapping[str, str], str], Outcome]


def _tool(name: str, description: str, *arguments: str, optional: Sequence[str] = ()) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in (*arguments, *optional)}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if arguments:
        parameters["required"] = list(arguments)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("list", "List files."),
    _tool("read", "Read a file, or one function of it.", "path", optional=("function",)),
    _tool("replace", "Replace text that occurs once.", "path", "old", "new"),
    _tool("test", "Run tests."),
    _tool("submit", "Finish."),
]
"""OpenAI's form. Terse: they are in every prompt."""
_PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


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
                text = self._read(given["path"])
                return _function(text, given["path"], given["function"]) if given.get("function") else text
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


def _function(text: str, path: str, name: str) -> str:
    """The lines of one function at the top of a module. Raises ToolError."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        raise ToolError(f"{path} is not Python: read all of it") from None
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return "\n".join(text.splitlines()[statement.lineno - 1 : statement.end_lineno])
    raise ToolError(f"there is no function {name!r} in {path}")


def _parse(name: str, arguments: str) -> dict[str, str]:
    """Raises ToolError."""
    if name not in _PARAMETERS:
        raise ToolError(f"there is no tool {name!r}")
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ToolError("the arguments are not JSON") from None
    if not isinstance(given, dict):
        raise ToolError("the arguments are not an object")
    parameters = _PARAMETERS[name]
    for argument in parameters["properties"]:
        if argument not in given and argument not in parameters["required"]:
            continue
        if not isinstance(given.get(argument), str):
            raise ToolError(f"{name} needs {argument}, a string")
        if any("\ud800" <= character <= "\udfff" for character in given[argument]):
            raise ToolError(f"{argument} is not Unicode")
    return given
