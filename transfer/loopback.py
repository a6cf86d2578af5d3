"""A transport inside one process, for tests: exact, and as bad as it is told to be.

Two ``LoopbackTransport`` of one ``Loopback`` reach each other by address. ``Faults`` are drawn from a seeded generator per message, so a
schedule can be replayed. Rules are those of the real one: a finished operation never touches its memory again, a late message finds
no receive, a dead peer is reported.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import PeerLost, TransferError
from transfer.transport import Operation, Piece, TransferCancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Shares are of messages, 0..1."""

    delay_s: float = 0.0
    """Longest; each message's own is drawn. More than 0 reorders."""
    drop: float = 0.0
    """The message never arrives, the sender thinks it did."""
    truncate: float = 0.0
    """A shorter message arrives and is taken for whole, as UCXX does."""
    corrupt: float = 0.0
    """One bit arrives wrong."""
    duplicate: float = 0.0
    """It arrives twice."""
    fail_send: float = 0.0
    """The sender is told of an error, nothing arrives."""
    die_after: int | None = None
    """The sender's process dies instead of sending its message of this number, 0-based."""


class Loopback:
    """The network: who is reachable, and the faults of each direction."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self._transports: dict[bytes, LoopbackTransport] = {}

    def transport(self, faults: Faults | None = None, max_message_bytes: int = 256 << 10) -> LoopbackTransport:
        """A process. ``faults`` befall what it sends."""
        made = LoopbackTransport(self, f"loopback-{len(self._transports)}".encode(), faults or Faults(), max_message_bytes)
        self._transports[made.address] = made
        return made

    def find(self, address: bytes) -> LoopbackTransport:
        if address not in self._transports:
            raise TransferError(f"no such loopback address: {address!r}")
        return self._transports[address]


class LoopbackTransport:
    name = "loopback"

    def __init__(self, network: Loopback, address: bytes, faults: Faults, max_message_bytes: int) -> None:
        self.network, self.faults, self.max_message_bytes = network, faults, max_message_bytes
        self._address = address
        self._receives: dict[int, _Receive] = {}
        self._connections: list[LoopbackConnection] = []
        self._sent = 0
        self.dead = False

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def open_receives(self) -> int:
        return len(self._receives)

    def connect(self, address: bytes) -> LoopbackConnection:
        connection = LoopbackConnection(self, self.network.find(address))
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def die(self) -> None:
        """As by SIGKILL: its peers notice, it does nothing any more."""
        self.dead = True
        for transport in self.network._transports.values():
            for connection in transport._connections:
                if connection.peer is self:
                    connection._lose()

    # ---- for connections -----------------------------------------------------------------------------------------

    def count_message(self) -> bool:
        """False: this is the one before which the process dies."""
        dies = self.faults.die_after == self._sent
        self._sent += 1
        if dies:
            self.die()
        return not dies

    def arrive(self, sender: LoopbackTransport, tag: int, data: bytes) -> None:
        """Into the receive posted under ``tag``, if there is one: late and repeated messages find none."""
        if self.dead or sender.dead or tag not in self._receives:
            return
        receive = self._receives.pop(tag)
        assert receive.connection.peer is sender
        if len(data) > receive.into.nbytes:
            receive.batch.end(receive.index, TransferError(f"the message under tag {tag} is longer than {receive.into.nbytes} bytes"))
            return
        receive.into[: len(data)] = data
        receive.batch.end(receive.index)


class _Batch:
    """Counts the messages of an operation."""

    def __init__(self, count: int, arrived: Callable[[int], None] | None = None) -> None:
        self.operation = Operation()
        self._open, self._arrived = count, arrived
        self._error: TransferError | None = None

    def end(self, index: int, error: TransferError | None = None) -> None:
        self._open -= 1
        self._error = self._error or error
        if error is None and self._arrived is not None:
            self._arrived(index)
        if self._open == 0:
            self.operation.finish(self._error)


@dataclass(frozen=True, slots=True)
class _Receive:
    connection: LoopbackConnection
    into: memoryview
    batch: _Batch
    index: int


class LoopbackConnection:
    def __init__(self, own: LoopbackTransport, peer: LoopbackTransport) -> None:
        self.own, self.peer, self.max_message_bytes = own, peer, own.max_message_bytes
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[Callable[[str], None]] = []
        self._lost: str | None = "the peer is dead" if peer.dead else None
        self._closed = False

    @property
    def lost(self) -> str | None:
        return self._lost

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._lost is not None:
            callback(self._lost)
        else:
            self._callbacks.append(callback)

    def post_receive(self, pieces: Sequence[Piece], arrived: Callable[[int], None] | None = None) -> Operation:
        batch = _Batch(len(pieces), arrived)
        for index, (into, tag) in enumerate(pieces):
            assert 1 <= into.nbytes <= self.max_message_bytes
            assert tag not in self.own._receives
            if self._closed or self._lost is not None:
                batch.end(index, self._reason())
            else:
                self.own._receives[tag] = _Receive(self, into, batch, index)
        return batch.operation

    def cancel(self, receive: Operation) -> None:
        """Takes a turn of the loop, like the real one; a message may win the race."""
        for tag in [tag for tag, posted in self.own._receives.items() if posted.batch.operation is receive]:
            self._loop.call_soon(self._end_receive, tag, TransferCancelled("the receive was cancelled"))

    def send(self, pieces: Sequence[Piece]) -> Operation:
        batch = _Batch(len(pieces))
        for index, (data, tag) in enumerate(pieces):
            self._send(batch, index, data, tag)
        return batch.operation

    def _send(self, batch: _Batch, index: int, data: memoryview, tag: int) -> None:
        assert 1 <= data.nbytes <= self.max_message_bytes
        if self._closed or self._lost is not None or self.own.dead or not self.own.count_message():
            batch.end(index, self._reason())
            return
        draw, faults = self.own.network.random, self.own.faults
        if draw.random() < faults.fail_send:
            self._loop.call_soon(batch.end, index, TransferError("injected send error"))
            return
        for _ in range(2 if draw.random() < faults.duplicate else 1):
            self._loop.call_later(draw.random() * faults.delay_s, self._deliver, data, tag)
        self._loop.call_later(faults.delay_s, batch.end, index)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._callbacks.clear()
        self._end_receives()

    def _deliver(self, data: memoryview, tag: int) -> None:
        """Reads the sender's memory as late as the real one may: until the send has finished."""
        draw, faults = self.own.network.random, self.own.faults
        message = bytearray(data)
        if draw.random() < faults.drop:
            return
        if draw.random() < faults.corrupt:
            message[draw.randrange(len(message))] ^= 1 << draw.randrange(8)
        if draw.random() < faults.truncate:
            del message[draw.randrange(len(message)) :]
        self.peer.arrive(self.own, tag, bytes(message))

    def _lose(self) -> None:
        if self._lost is not None or self._closed:
            return
        self._lost = "the peer is dead"
        self._end_receives()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self._lost)

    def _end_receives(self) -> None:
        for tag in [tag for tag, posted in self.own._receives.items() if posted.connection is self]:
            self._end_receive(tag, self._reason())

    def _end_receive(self, tag: int, error: TransferError) -> None:
        if tag in self.own._receives:
            posted = self.own._receives.pop(tag)
            posted.batch.end(posted.index, error)

    def _reason(self) -> TransferError:
        if self.own.dead:
            return TransferError("this process is dead")
        return TransferCancelled("the connection was closed") if self._closed else PeerLost(self._lost or "the peer is dead")
