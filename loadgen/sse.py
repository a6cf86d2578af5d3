"""Read an OpenAI-style stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from protocol.errors import BatonError

TIMEOUT = httpx.Timeout(10.0, read=None)


class ServerError(BatonError):
    """The server answered with an error, before or after the stream began."""

    def __init__(self, message: str, kind: str = "stream") -> None:
        super().__init__(message)
        self.kind = kind
        """For counting: ``http 429``, ``error event``, ``stream``."""


async def stream_json(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST ``body`` with stream=true and yield each event's JSON until [DONE]. Raises ServerError, httpx.TransportError."""
    async with client.stream("POST", url, json=body | {"stream": True}) as answer:
        if answer.status_code != httpx.codes.OK:
            raise ServerError(error_text(await answer.aread(), answer.status_code), f"http {answer.status_code}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").lstrip()
            if data == "[DONE]":
                return
            yield _checked(data)
    raise ServerError("the stream ended without [DONE]")


def error_text(body: bytes, status: int) -> str:
    """The message of an error body, whatever shape it has."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"


def _checked(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise ServerError(f"the stream has an event that isn't JSON: {data[:200]}") from None
    if not isinstance(event, dict):
        raise ServerError(f"the stream has an event that isn't an object: {data[:200]}")
    if error := event.get("error"):
        raise ServerError(str(error.get("message", error) if isinstance(error, dict) else error), "error event")
    return event
