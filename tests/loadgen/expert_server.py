"""An OpenAI-compatible server on a real socket that plays the expert, or misbehaves as a test says."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from loadgen.swe.expert import closing, expert_calls
from loadgen.swe.instance import Instance, make_instance

PATIENCE_S = 100.0
Fault = Callable[[Instance, int], str | None]
"""By instance and number of answers so far: one of FAULTS, or a text to say instead of the expert's."""


def call_in_one(name: str, arguments: str) -> list[dict[str, Any]]:
    """As Baton and others do: the whole call at once; some leave the index out."""
    return [{"tool_calls": [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}]}]


def call_in_pieces(name: str, arguments: str) -> list[dict[str, Any]]:
    """As OpenAI does: the name first, then the arguments a few characters at a time."""
    head = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": arguments[at : at + 5]}} for at in range(0, len(arguments), 5)]
    return [{"tool_calls": [part]} for part in (head, *parts)]


@dataclass
class ExpertServer:
    seeds: Iterable[int]
    fault: Fault = lambda _, __: None
    call: Callable[[str, str], list[dict[str, Any]]] = call_in_pieces
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for an answer that never comes."""
    url: str = ""

    def __post_init__(self) -> None:
        self._by_issue = {instance.issue: instance for instance in map(make_instance, self.seeds)}

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(lambda: {"data": [{"id": "expert", "owned_by": "nobody"}]})
        app.post("/v1/chat/completions")(self._answer)
        app.post("/v1/completions")(self._complete)
        return app

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        messages = body["messages"]
        instance = self._by_issue[messages[1]["content"]]
        number = sum(message["role"] == "assistant" for message in messages)
        fault = self.fault(instance, number)
        if fault in ("429", "500"):
            return JSONResponse({"error": {"message": "no"}}, status_code=int(fault))
        deltas = self._deltas(instance, sum("tool_calls" in message for message in messages))
        if fault is not None and fault not in FAULTS:
            deltas = [{"content": fault}]
        return StreamingResponse(self._events(deltas, fault), media_type="text/event-stream")

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return StreamingResponse(self._words(), media_type="text/event-stream")

    async def _words(self) -> AsyncIterator[str]:
        for word in ("one", " two"):
            yield event({"choices": [{"index": 0, "text": word, "finish_reason": None}]})
        yield event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        yield "data: [DONE]\n\n"

    def _deltas(self, instance: Instance, num_calls: int) -> list[dict[str, Any]]:
        calls = expert_calls(instance)
        if num_calls >= len(calls):
            return [{"content": closing(instance)["content"]}]
        name, arguments = calls[num_calls]
        return self.call(name, json.dumps(arguments))

    async def _events(self, deltas: list[dict[str, Any]], fault: str | None) -> AsyncIterator[str]:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for delta in deltas:
            yield event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if fault == "hang":
            self.hanging.set()
            await asyncio.sleep(PATIENCE_S)
        if fault == "disconnect":
            raise ConnectionAbortedError
        if fault == "error event":
            yield event({"error": {"message": "the worker died"}})
            return
        if fault == "no end":
            return
        yield "data: {broken\n\n" if fault == "not json" else event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(deltas), "prompt_tokens_details": {"cached_tokens": 3}}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


FAULTS = ("429", "500", "disconnect", "error event", "no end", "not json", "hang")


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def serving(server: ExpertServer) -> Iterator[ExpertServer]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(server.app(), log_config=None, timeout_graceful_shutdown=1, lifespan="off")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield server
        finally:
            running.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
