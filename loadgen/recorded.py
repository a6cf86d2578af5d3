"""Recorded conversations: a load that is the same whatever the model answers.

A file has one JSON object per line: ``messages``, in OpenAI's form and including the assistant's, optionally ``tools``, and a
``name``. Each assistant message is one turn: what stands before it is sent, the answer is measured, and the session goes on with
the answer that was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.client import AskError, Client
from loadgen.record import Session, turn_of
from loadgen.symptoms import symptoms


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


async def replay(conversation: Conversation, client: Client, session: Session, began_at: float) -> None:
    """Fill ``session`` with one turn per assistant message, up to one that fails."""
    for place, message in enumerate(conversation.messages):
        if message.get("role") != "assistant":
            continue
        try:
            answer = await client.chat(conversation.messages[:place], conversation.tools)
        except AskError as error:
            session.turns.append(turn_of(error.answer, began_at, failure=error.kind))
            return
        found = symptoms(answer, expects_call=bool(message.get("tool_calls")))
        session.turns.append(turn_of(answer, began_at, found))


def read_conversations(path: Path) -> list[Conversation]:
    """Raises ValueError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"sessions_file={path} can't be read: {error}") from error
    found = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"sessions_file={path} has no conversations")
    return found


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for one in conversations:
            entry = {"name": one.name, "messages": one.messages} | ({"tools": one.tools} if one.tools else {})
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _parse(path: Path, number: int, line: str) -> Conversation:
    where = f"sessions_file={path}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(f"{where} has no array of messages")
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise ValueError(f"{where} has no assistant message that follows another")
    return Conversation(str(entry.get("name", number)), messages, entry.get("tools"))
