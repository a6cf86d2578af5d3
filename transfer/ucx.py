"""The UCX transport, through UCXX: the only file that imports it.

Why it is as it is (measured; ``docs/decisions`` has the figures):

- Worker addresses over our own control channel leave all of UCX's transports open. Error handling is on, so that a peer's death is
  known in milliseconds.
- UCXX's own asyncio waits spin (``sleep(0)`` until done), so requests are driven here: the worker's event descriptor wakes the loop,
  progress is made in slices, finished requests are told, the worker is armed again.
- No message is longer than one transport segment. UCX copies such a message into the posted receive in one go. A longer one arrives in
  fragments, and when the sender dies between two of them the receive stays open for ever: neither its end nor a cancel is
  ever reported, and its pages could never be reused.
- UCXX can't cancel one receive. To do it we send ourselves an empty message under its tag: whichever message comes first ends the
  receive, and a second receive into scratch swallows the other one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from protocol.errors import PeerLost, TransferError
from transfer.transport import Operation, Piece, TransferCancelled

MESSAGE_BYTES = 256 << 10
SEGMENT_BYTES = MESSAGE_BYTES + (8 << 10)
"""With room for UCX's headers."""

ALWAYS = {"UCX_MEMTYPE_CACHE": "n", "UCX_WARN_UNUSED_ENV_VARS": "n"}
WITHOUT_RDMA = {
    "UCX_RNDV_THRESH": "inf",
    "UCX_TCP_TX_SEG_SIZE": str(SEGMENT_BYTES),
    "UCX_TCP_RX_SEG_SIZE": str(SEGMENT_BYTES),
}
"""Rendezvous over TCP is slower, and its messages are fragmented. Where there is RDMA, rendezvous is what makes it zero-copy."""


def prepare_environment() -> None:
    """Sets what UCX reads when it is loaded; the operator's own ``UCX_*`` variables win."""
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    for variable, value in (ALWAYS if rdma else ALWAYS | WITHOUT_RDMA).items():
        os.environ.setdefault(variable, value)


prepare_environment()

import ucxx  # noqa: E402
from ucxx._lib import libucxx  # noqa: E402
from ucxx._lib.arr import Array  # noqa: E402
from ucxx.types import Tag  # noqa: E402

SLICE_S = 0.002
"""Longest stretch of progress before the loop gets its turn."""
WATCH_S = 1.0
"""UCX's own keep-alive and timers need progress now and then, whatever the descriptor says."""
CLOSE_NS = 100_000_000
MAGIC = b"baton-ucx-1"
ENVELOPE_BYTES = len(MAGIC) + 8
OK, IN_PROGRESS = 0, 1
LOST = "the peer's connection broke"
CANCELLED = libucxx.UCXCanceledError
TRUNCATED = libucxx.UCXMessageTruncatedError

log = logging.getLogger(__name__)


def version() -> str:
    """Of UCXX and UCX, for /health and ``baton doctor``."""
    return f"ucxx {ucxx.__version__}, ucx {ucxx.__ucx_version__}"


def _envelope(address: bytes) -> bytes:
    """UCX aborts the process when it is given an address that isn't one, so it only sees those that come through whole."""
    return MAGIC + xxhash.xxh3_64_digest(address) + address


class UcxTransport:
    """One UCX worker on the running asyncio loop. Raises TransferError if UCX can't start."""

    name = "ucx"
    max_message_bytes = MESSAGE_BYTES

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._context = libucxx.UCXContext({}, feature_flags=(libucxx.Feature.TAG, libucxx.Feature.WAKEUP))
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except libucxx.UCXError as error:
            raise TransferError(f"UCX can't start: {error}") from None
        self._address = _envelope(self._worker.address.tobytes())
        self._self_endpoint = self._endpoint(self._address)  # now, not at the first cancel: it takes tens of milliseconds
        self._connections: list[UcxConnection] = []
        self._scratch = bytearray(MESSAGE_BYTES)
        self._closed = False
        self._turn: asyncio.Handle | None = None
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._progress)
        self._watch = self._loop.call_later(WATCH_S, self._on_watch)
        self.wake()

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, address: bytes) -> UcxConnection:
        connection = UcxConnection(self, self._endpoint(address))
        self._connections.append(connection)
        self.wake()
        return connection

    def close(self) -> None:
        if self._closed:
            return
        for connection in list(self._connections):
            connection.close()
        self._closed = True
        self._watch.cancel()
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._descriptor)
        self._self_endpoint.close_blocking(CLOSE_NS, 1)
        self._self_endpoint = self._worker = self._context = None

    # ---- for connections -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make progress in this loop's next turn: after every post, because the worker isn't armed any more."""
        if self._turn is None and not self._closed:
            self._turn = self._loop.call_soon(self._progress)

    def send_nothing_to_self(self, tag: int) -> Any:
        return self._self_endpoint.tag_send(Array(memoryview(b"")), Tag(tag))

    def scratch(self) -> Any:
        return Array(memoryview(self._scratch))

    def run_down(self) -> None:
        """Progress until nothing moves, without telling anybody."""
        self._worker.progress()

    def forget(self, connection: UcxConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _endpoint(self, address: bytes) -> Any:
        inner = address[ENVELOPE_BYTES:]
        if not inner or address != _envelope(inner):
            raise TransferError(f"not a UCX address: {len(address)} bytes")
        try:
            peer = libucxx.UCXAddress.create_from_buffer(inner)
            return libucxx.UCXEndpoint.create_from_worker_address(self._worker, peer, True)
        except libucxx.UCXError as error:
            raise TransferError(f"can't connect over UCX: {error}") from None

    # ---- progress ------------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        until = time.perf_counter() + SLICE_S
        while not self._closed and self._worker.progress_once():
            self._advance()
            if time.perf_counter() > until:
                self.wake()
                return
        self._advance()
        if not self._closed and not self._worker.arm():
            self.wake()

    def _advance(self) -> None:
        for connection in tuple(self._connections):
            connection.advance()

    def _on_watch(self) -> None:
        self._watch = self._loop.call_later(WATCH_S, self._on_watch)
        self.wake()


class _Batch:
    """An operation with its UCXX requests, in order. ``pieces`` keep the memory referenced as long as UCX may touch it."""

    __slots__ = ("arrived", "cancelled", "error", "next", "operation", "pieces", "requests")

    def __init__(self, pieces: Sequence[Piece], arrived: Callable[[int], None] | None) -> None:
        self.operation = Operation()
        self.pieces, self.arrived = pieces, arrived
        self.requests: list[Any] = []
        self.next = 0
        """All requests before this one have ended."""
        self.cancelled: set[int] = set()
        self.error: TransferError | None = None


class UcxConnection:
    """One endpoint. ``lost`` and ``on_lost`` follow UCX's own word on it."""

    max_message_bytes = MESSAGE_BYTES

    def __init__(self, transport: UcxTransport, endpoint: Any) -> None:
        self._transport, self._endpoint = transport, endpoint
        self._batches: list[_Batch] = []
        self._nulls: list[Any] = []
        self._sinks: list[Any] = []
        self._callbacks: list[Callable[[str], None]] = []
        self._broken = False
        self._lost: str | None = None
        self._closed = False
        endpoint.set_close_callback(self._on_broken)

    @property
    def lost(self) -> str | None:
        return self._lost

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._lost is not None:
            callback(self._lost)
        elif not self._closed:
            self._callbacks.append(callback)

    def post_receive(self, pieces: Sequence[Piece], arrived: Callable[[int], None] | None = None) -> Operation:
        return self._post(_Batch(pieces, arrived), "tag_recv")

    def send(self, pieces: Sequence[Piece]) -> Operation:
        return self._post(_Batch(pieces, None), "tag_send")

    def cancel(self, receive: Operation) -> None:
        batch = next((batch for batch in self._batches if batch.operation is receive), None)
        if batch is None or batch.cancelled or self._closed or self._broken:
            return
        batch.cancelled = {i for i in range(batch.next, len(batch.requests)) if batch.requests[i].status == IN_PROGRESS}
        self._nulls = [null for null in self._nulls if not null.completed]
        self._nulls += [self._transport.send_nothing_to_self(batch.pieces[i][1]) for i in batch.cancelled]
        self._transport.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._callbacks.clear()
        if self._lost is None:
            self._shut()
        self._transport.forget(self)

    # ---- for the transport ---------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Tells what has ended, then the loss of the peer, if it was lost."""
        for batch in tuple(self._batches):
            self._advance(batch)
        if self._broken and not self._closed and self._lost is None:
            self._lose()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _post(self, batch: _Batch, how: str) -> Operation:
        assert batch.pieces
        if self._closed or self._broken:
            batch.operation.finish(self._reason())
            return batch.operation
        post = getattr(self._endpoint, how)
        try:
            for memory, tag in batch.pieces:
                assert memory.nbytes <= MESSAGE_BYTES
                batch.requests.append(post(Array(memory), Tag(tag)))
        except libucxx.UCXError as error:  # the rest is never posted; the batch ends with what was
            batch.error = PeerLost(str(error))
        self._batches.append(batch)
        self._transport.wake()
        return batch.operation

    def _advance(self, batch: _Batch) -> None:
        requests = batch.requests
        while batch.next < len(requests) and (status := requests[batch.next].status) != IN_PROGRESS:
            index = batch.next
            batch.next += 1
            if index in batch.cancelled:
                batch.error = batch.error or TransferCancelled("the receive was cancelled")
                self._swallow_the_other(batch.pieces[index][1])
            elif status != OK:
                batch.error = batch.error or self._error(requests[index], batch.pieces[index])
            elif batch.arrived is not None:
                batch.arrived(index)
        if batch.next == len(requests) and batch in self._batches:
            self._batches.remove(batch)
            batch.operation.finish(batch.error)

    def _on_broken(self, *_: object) -> None:
        """Called by UCX inside progress: nothing but a note may be made here."""
        self._broken = True
        self._transport.wake()

    def _lose(self) -> None:
        self._lost = LOST
        self._shut()
        callbacks, self._callbacks = self._callbacks, []
        self._transport.forget(self)
        for callback in callbacks:
            callback(self._lost)

    def _shut(self) -> None:
        """Closing the endpoint cancels its receives. One that stays open was hit between two fragments; it is never told."""
        self._endpoint.remove_close_callback()
        self._endpoint.close_blocking(CLOSE_NS, 1)
        self._transport.run_down()
        for batch in tuple(self._batches):
            self._advance(batch)
        self._sinks.clear()
        self._nulls.clear()
        for batch in self._batches:
            log.error("%d receives never ended after their connection did; their pages stay reserved", len(batch.requests) - batch.next)
        self._endpoint = None

    def _swallow_the_other(self, tag: int) -> None:
        if self._broken or self._closed:
            return
        self._sinks = [sink for sink in self._sinks if not sink.completed]
        self._sinks.append(self._endpoint.tag_recv(self._transport.scratch(), Tag(tag)))
        self._transport.wake()

    def _error(self, request: Any, piece: Piece) -> TransferError:
        try:
            request.check_error()
        except TRUNCATED:
            return TransferError(f"the message under tag {piece[1]} is longer than {piece[0].nbytes} bytes")
        except CANCELLED:
            return self._reason()
        except libucxx.UCXError as error:
            return PeerLost(str(error))
        raise AssertionError("a request with a bad status has no error")

    def _reason(self) -> TransferError:
        return TransferCancelled("the connection was closed") if self._closed else PeerLost(LOST)
