"""The requests that wait for room, in order of arrival."""

from __future__ import annotations

from protocol.ids import RequestId
from router.request import Request


class WaitingLine:
    """Joining and leaving cost the same however many wait: they may all leave at once."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, Request] = {}
        self._last = -1
        """The highest number that has joined since all were in order."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.order.request_id in self._requests

    def join(self, request: Request) -> None:
        """One that was sent back can be older than those that wait: it gets its place when they are next gone through."""
        self._requests[request.order.request_id] = request
        self._in_order = self._in_order and request.number > self._last
        self._last = max(self._last, request.number)

    def leave(self, request: Request) -> None:
        """Nothing happens if it doesn't wait."""
        self._requests.pop(request.order.request_id, None)

    def in_order(self) -> list[Request]:
        """A copy: they may leave and join meanwhile."""
        if not self._in_order:
            self._requests = dict(sorted(self._requests.items(), key=lambda entry: entry[1].number))
            self._in_order = True
        return list(self._requests.values())
