"""Ask one server: its model, and one streamed answer at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from loadgen.answer import Answer
from loadgen.sse import TIMEOUT, ServerError, error_text, stream_json

KNOWN_OWNERS = ("baton", "vllm")
"""``owned_by`` of servers that tell token ids and can be asked to go on after an end token."""


class AskError(Exception):
    """An answer that didn't come, or not whole."""

    def __init__(self, kind: str, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.kind = kind
        """For counting."""
        self.answer = answer
        """What there is of it."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: str
    owner: str
    """``owned_by`` of the model."""

    @property
    def knows_extensions(self) -> bool:
        return self.owner in KNOWN_OWNERS

    @property
    def extensions(self) -> dict[str, Any]:
        """Fields of the request, for servers that are known to have them: others may refuse what they don't know."""
        known: dict[str, Any] = {"stream_options": {"include_usage": True}}
        if self.knows_extensions:
            known["return_token_ids"] = True
        if self.owner == "baton":
            known["return_timings"] = True
        return known


@dataclass(frozen=True, slots=True)
class Client:
    """Any number of answers at once. Use ``open_client``."""

    http: httpx.AsyncClient
    server: Server
    options: Mapping[str, Any]
    """Of every request: temperature and the like."""
    timeout_s: float
    """For one answer."""

    async def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **more: Any) -> Answer:
        """Raises AskError."""
        return await self._ask("/v1/chat/completions", {"messages": messages} | ({"tools": tools} if tools else {}) | more)

    async def complete(self, prompt: str, **more: Any) -> Answer:
        """Raises AskError."""
        return await self._ask("/v1/completions", {"prompt": prompt} | more)

    async def _ask(self, path: str, body: dict[str, Any]) -> Answer:
        request = {"model": self.server.model} | self.server.extensions | dict(self.options) | body
        answer = Answer(asked_at=time.monotonic())
        try:
            async with asyncio.timeout(self.timeout_s):
                async for event in stream_json(self.http, self.server.url + path, request):
                    answer.take(event, time.monotonic())
        except ServerError as error:
            raise AskError(error.kind, str(error), answer) from error
        except TimeoutError as error:
            raise AskError("timeout", f"no whole answer after {self.timeout_s:.0f} s", answer) from error
        except httpx.HTTPError as error:
            raise AskError("connection", str(error) or type(error).__name__, answer) from error
        answer.ended_at = time.monotonic()
        return answer


async def find_server(http: httpx.AsyncClient, url: str, model: str | None = None) -> Server:
    """The model asked for, or the server's first. Raises ServerError."""
    try:
        answer = await http.get(f"{url}/v1/models", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"no server at {url}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise ServerError(error_text(answer.content, answer.status_code))
    try:
        cards = {str(card["id"]): str(card.get("owned_by")) for card in answer.json()["data"]}
        name = model or next(iter(cards))
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        raise ServerError(f"{url}/v1/models doesn't list models; is it an OpenAI-compatible server?") from None
    return Server(url, name, cards.get(name, ""))


def http_client(api_key: str | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), headers=headers, trust_env=False)
