"""HTTP connections that don't wait for ever: uvicorn's protocol, with a bound on how long a request may take to arrive."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ApiError


class BoundedHttp(HttpToolsProtocol):
    """From connecting, or from a request's first byte, until all of it is there. Time spent on an answer doesn't count."""

    receive_timeout_s: ClassVar[float]

    _timer: asyncio.TimerHandle | None = None
    _begun = False
    """Some of a request has come, not all of it."""
    _num_unanswered = 0
    """Requests that have arrived whole; below 0: answered before they had."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._start_timer()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._start_timer()
        self._begun = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._begun = False
        self._num_unanswered += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._num_unanswered -= 1
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.receive_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._num_unanswered > 0:  # the next request has to wait for this answer
            self._start_timer()
        elif not self.transport.is_closing():
            if self._begun and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
                self.transport.write(_too_late(self.receive_timeout_s))
            self.transport.close()


def bounded_http(receive_timeout_s: float) -> type[BoundedHttp]:
    """The class for a server with this bound: uvicorn makes the objects itself."""
    return type("BoundedHttp", (BoundedHttp,), {"receive_timeout_s": receive_timeout_s})


def _too_late(after_s: float) -> bytes:
    error = ApiError(408, f"the request did not arrive whole within {after_s:g} s", code="request_timeout")
    body = json.dumps(error.body()).encode()
    head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body
