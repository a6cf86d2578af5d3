"""What was said in a chat, in the form that a server and a file take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Messages after the system prompt."""
    _saved: set[Path] = field(default_factory=set)

    def body(self, *new: dict[str, Any]) -> dict[str, Any]:
        """The fields of a request that say what was said, and ``new`` after it."""
        leading = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*leading, *self.turns, *new]} | ({"tools": self.tools} if self.tools else {})

    def save(self, path: Path) -> None:
        """As JSON that can be sent again. Overwrites only what it has written itself. Raises OSError."""
        with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
            json.dump(self.body(), file, ensure_ascii=False, indent=2)
            file.write("\n")
        self._saved.add(path)


def read_tools(path: Path) -> list[dict[str, Any]]:
    """A JSON array of functions as the OpenAI API takes them. Raises ValueError that names the file."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tools={path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"tools={path} is not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools={path} is not an array of tools")
    return tools
