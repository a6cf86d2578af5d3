"""One HTTP request that generates: it may have several sequences. An ASGI response, streamed or whole.

Nothing is sent before the first token or failure, so that a failure before it has its proper status. After that a failure is an
error event, and the stream ends without a finish and without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence as Many

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answers import Answer, Collected, Usage
from router.cluster import Cluster
from router.errors import ApiError, from_ending
from router.events import Ending
from router.json_text import JsonAnswer
from router.request import Order
from router.sequence import Delta, Finish, Sequence

MAX_UNSENT_CHARACTERS = 8 << 20
"""A client that reads so much more slowly than its answer is made loses it."""


class Generation(Response):
    """Give it its sequences with ``start_with``, then return it to the framework."""

    def __init__(self, cluster: Cluster, answer: Answer, *, stream: bool, include_usage: bool, num_prompt_tokens: int) -> None:
        self._cluster = cluster
        self._answer = answer
        self._stream = stream
        self._include_usage = include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._orders: list[tuple[Order, Sequence]] = []
        self._running: set[int] = set()
        self._outbox: list[str] = []
        self._unsent = 0
        self._deltas: dict[int, list[Delta]] = {}
        self._collected: list[Collected] = []
        self._error: ApiError | None = None
        self._wake = asyncio.Event()
        self._num_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        """By prompt: the choices of one prompt have it in common, and what one of them computed wasn't cached."""
        self._left = False
        self.status_code = 200
        self.background = None

    def start_with(self, orders: Many[tuple[Order, Sequence]]) -> None:
        self._orders = list(orders)
        self._running = {sequence.index for _, sequence in orders}

    # ---- the sequences' listener

    def on_delta(self, sequence: Sequence, delta: Delta) -> None:
        if not self._stream:
            self._deltas.setdefault(sequence.index, []).append(delta)
            return
        event = self._answer.chunk(sequence, delta)
        if event is not None:
            self._put(event)

    def on_finish(self, sequence: Sequence, delta: Delta, finish: Finish) -> None:
        self._running.discard(sequence.index)
        self._num_tokens += sequence.num_tokens
        prompt = id(sequence.prompt)
        self._cached_tokens[prompt] = min(sequence.cached_tokens, self._cached_tokens.get(prompt, sequence.cached_tokens))
        if self._stream:
            self._put(self._answer.last_chunk(sequence, delta, finish))
        else:
            self._collected.append(Collected(sequence, _joined([*self._deltas.pop(sequence.index, []), delta]), finish))
        if not self._running:
            self._wake.set()

    def on_failure(self, sequence: Sequence, ending: Ending) -> None:
        """One failed sequence fails the request."""
        self._running.discard(sequence.index)
        if ending.kind == "failed" and self._error is None:
            self._error = from_ending(ending, self._cluster.retry_after_s())
            self._cancel()
        self._wake.set()

    def _put(self, event: str) -> None:
        self._outbox.append(event)
        self._unsent += len(event)
        self._wake.set()
        if self._unsent > MAX_UNSENT_CHARACTERS and self._error is None:
            self._error = ApiError(503, "the client reads too slowly", code="slow_client")
            asyncio.get_running_loop().call_soon(self._cancel)  # not from within a sequence's own tokens

    def _cancel(self) -> None:
        """What still runs. Harmless when nothing does."""
        for order, sequence in self._orders:
            if sequence.index in self._running:
                self._running.discard(sequence.index)
                self._cluster.cancel(order.request_id)

    # ---- the response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            for order, sequence in self._orders:
                if self._error is None:
                    self._cluster.submit(order, sequence)
            await (self._send_stream(send) if self._stream else self._send_whole(send))
        finally:
            self._cancel()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._cancel()
        self._wake.set()

    async def _send_whole(self, send: Send) -> None:
        while self._running:
            self._wake.clear()
            await self._wake.wait()
        if self._left:
            return
        if self._error is not None:
            await send_error(send, self._error)
        else:
            self._collected.sort(key=lambda one: one.sequence.index)
            await send_json(send, 200, self._answer.whole(self._collected, self._usage()))

    async def _send_stream(self, send: Send) -> None:
        await self._wake.wait()
        if self._error is not None and not self._left:
            await send_error(send, self._error)
        if self._error is not None or self._left:
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            self._wake.clear()
            ended = not self._running
            body = self._take_outbox()
            if self._left:
                return
            if ended:
                body += self._farewell()
            if body or ended:
                await send({"type": "http.response.body", "body": body.encode("ascii"), "more_body": not ended})
            if ended:
                return
            await self._wake.wait()

    def _take_outbox(self) -> str:
        text = "".join(self._outbox)
        self._outbox.clear()
        self._unsent = 0
        return text

    def _farewell(self) -> str:
        if self._error is not None:
            return f"data: {json.dumps(self._error.body())}\n\n"
        usage = self._answer.usage_chunk(self._usage()) if self._include_usage else ""
        return f"{usage}data: [DONE]\n\n"

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=sum(self._cached_tokens.values()),
        )


async def send_json(send: Send, status: int, body: object, headers: dict[str, str] | None = None) -> None:
    answer = JsonAnswer(body, status, headers)
    await send({"type": "http.response.start", "status": status, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body(), error.headers())


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join([delta.text for delta in deltas]),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
    )
