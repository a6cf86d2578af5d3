"""The two ZeroMQ sockets of the control plane, for asyncio: a Hub is bound and talks to many, a Link dials one Hub.

A message is a frame; a Link may send several together, which costs hardly more than one. Encoding is the codec's matter. Sending
never blocks: it returns False when the other side isn't connected or doesn't read, and the caller treats the peer as lost. Nothing
lingers after ``close``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import ConfigError

HEARTBEAT_S = 0.5
MISSED_HEARTBEATS = 3
DEAD_AFTER_S = HEARTBEAT_S * MISSED_HEARTBEATS
"""A peer that was silent for longer is dead."""

QUEUED_MESSAGES = 10_000
"""High-water mark, each way and per peer."""


class _Socket:
    """What Hub and Link share: options, life, and a context that is theirs unless one is given."""

    def __init__(self, kind: int, context: zmq.asyncio.Context | None) -> None:
        self._owned = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # longer ones cost the sender its connection

    async def _send(self, frames: list[bytes]) -> bool:
        try:
            await self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Drops what wasn't sent within ``linger_ms``. May be called twice. A pending ``recv`` is cancelled."""
        self._socket.close(linger_ms)
        if self._owned:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Hub(_Socket):
    """A bound ROUTER socket. Raises ConfigError that names the address if it can't be bound."""

    def __init__(self, address: str, context: zmq.asyncio.Context | None = None) -> None:
        """``address``: tcp://IPV4:PORT; port 0 takes a free one, see ``address`` afterwards."""
        super().__init__(zmq.ROUTER, context)
        self._pending: deque[tuple[bytes, bytes]] = deque()
        """Of a batch that isn't given out yet."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that redials is the same peer: identities are epochs
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't bind {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The real one, with the port that was taken."""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def recv(self) -> tuple[bytes, bytes]:
        """The next message with its sender's identity."""
        while not self._pending:
            identity, *messages = await self._socket.recv_multipart()
            self._pending.extend((identity, message) for message in messages)
        return self._pending.popleft()

    async def send(self, identity: bytes, message: bytes) -> bool:
        """False: no such peer is connected, or it doesn't read."""
        return await self._send([identity, message])


class Link(_Socket):
    """A DEALER socket that dials one Hub and redials for ever; messages wait meanwhile."""

    def __init__(self, address: str, identity: bytes, context: zmq.asyncio.Context | None = None) -> None:
        super().__init__(zmq.DEALER, context)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_S))  # a silent network breaks the connection too
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * DEAD_AFTER_S))
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't dial {address}: {error}") from None
        self.address = address

    async def watch(self, on_change: Callable[[bool], None]) -> None:
        """Tell each time the connection stands (True) or breaks (False). Until cancelled."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            on_change(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self, linger_ms: int = 0) -> None:
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
        super().close(linger_ms)

    async def recv(self) -> bytes:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) == 1:
                return frames[0]

    async def send(self, *messages: bytes) -> bool:
        """In order; several together arrive together. False: the queue is full, the other side hasn't read for long."""
        return await self._send(list(messages))
