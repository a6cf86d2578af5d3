"""What every transport does: move bytes between two processes' memory by tag, and say truthfully when it no longer touches them.

The receiver posts receives and tells the sender by other means which bytes it wants under which tag; then the sender sends. A tag is used
once in a receiver's life. An operation that has finished, in whatever way, never touches its memory again: that is the only
thing that makes pages reusable. All of it happens on one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from protocol.errors import TransferError


class TransferCancelled(TransferError):
    """Somebody called ``cancel``, or closed the connection."""


Piece = tuple[memoryview, int]
"""Bytes of one message, at most the transport's ``max_message_bytes``, and its tag."""


class Operation:
    """One posted batch of receives or sends. It has finished when none of its messages is under way any more."""

    __slots__ = ("_callbacks", "error", "finished")

    def __init__(self) -> None:
        self.finished = False
        self.error: TransferError | None = None
        """None after a good end, or the first thing that went wrong: PeerLost, TransferCancelled, TransferError."""
        self._callbacks: list[Callable[[Operation], None]] = []

    def when_finished(self, callback: Callable[[Operation], None]) -> None:
        """Called on the loop's thread, at once if it has finished already."""
        if self.finished:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def wait(self) -> None:
        """Raises ``error``. Giving up waiting doesn't cancel the operation."""
        if not self.finished:
            finished = asyncio.Event()
            self.when_finished(lambda _: finished.set())
            await finished.wait()
        if self.error is not None:
            raise self.error

    def finish(self, error: TransferError | None = None) -> None:
        """For transports only."""
        assert not self.finished
        self.finished, self.error = True, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Connection(Protocol):
    """To one life of one peer."""

    max_message_bytes: int

    @property
    def lost(self) -> str | None:
        """Why the peer is gone, or None."""

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Called once, with the reason, when the peer dies (at once if it is lost already); not after ``close``."""

    def post_receive(self, pieces: Sequence[Piece], arrived: Callable[[int], None] | None = None) -> Operation:
        """Into writable memory. ``arrived(i)`` is called soon after piece i has come, whole and for good."""

    def cancel(self, receive: Operation) -> None:
        """Asks for the end of a receive, which comes later: with its bytes if they were on their way, else with TransferCancelled."""

    def send(self, pieces: Sequence[Piece]) -> Operation: ...

    def close(self) -> None:
        """Every open operation ends before this returns. May be called twice. The peer isn't told: say goodbye by message."""


class Transport(Protocol):
    """One per process."""

    name: str
    max_message_bytes: int

    @property
    def address(self) -> bytes:
        """What a peer needs to connect; opaque."""

    def connect(self, address: bytes) -> Connection:
        """Both sides connect to each other. Doesn't wait. Raises TransferError for an address that makes no sense."""

    def close(self) -> None:
        """Closes all connections. May be called twice."""
