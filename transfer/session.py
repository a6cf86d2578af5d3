"""The transport's part of a hand-off: runs a lifecycle's copies and checksums, and passes on what is the worker's to do.

``ReceiveSession`` on D, ``SendSession`` on P: ``feed`` them events, get the worker's commands through ``on_command``, in order. Both live
on the asyncio loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from protocol.regions import RegionName
from transfer import receive, send
from transfer.checksums import ArrivingPages
from transfer.commands import (
    CancelReceives,
    Commit,
    Compute,
    Ended,
    EndLease,
    Fail,
    GrantLease,
    PostReceives,
    PostSends,
    Refuse,
    Say,
    Verify,
)
from transfer.layout import Layout
from transfer.plan import cut
from transfer.transport import Connection, Operation, Piece

CommandT = TypeVar("CommandT")
ReceiveCommand = Say | Fail | Commit | Ended
SendCommand = Say | Compute | Refuse | GrantLease | EndLease | Ended


class _Events(Generic[CommandT]):
    """Feeds a lifecycle one event at a time: what happens while its commands are being done waits for its turn."""

    def __init__(self, handle: Callable[[object], Sequence[CommandT]], do: Callable[[CommandT], None]) -> None:
        self._handle, self._do = handle, do
        self._events: deque[object] = deque()
        self._commands: deque[CommandT] = deque()
        self._busy = False

    def feed(self, event: object) -> None:
        self._events.append(event)
        if not self._busy:
            self._run()

    def _run(self) -> None:
        self._busy = True
        paused = False
        try:
            while not paused and (self._commands or self._events):
                if self._commands:
                    self._do(self._commands.popleft())
                    paused = self._pauses()
                else:
                    self._commands.extend(self._handle(self._events.popleft()))
        finally:
            self._busy = paused

    def _pauses(self) -> bool:
        """Before another batch of receives the loop gets its turn, so that the pull for the one before goes out meanwhile."""
        if not self._commands or not isinstance(self._commands[0], PostReceives):
            return False
        asyncio.get_running_loop().call_soon(self._run)
        return True


class ReceiveSession:
    """One hand-off on D. Begin it with ``feed(receive.Begin())``.

    The worker's commands: Say (to P), Fail (to the router, at once), Commit (land it, now), Ended (the pages may be freed if not ok).
    """

    def __init__(
        self,
        machine: receive.HandoffReceiver,
        connection: Connection,
        layout: Layout,
        on_command: Callable[[ReceiveCommand], None],
    ) -> None:
        assert machine.reservation.max_bytes == connection.max_message_bytes
        self.machine = machine
        self._connection, self._layout, self._on_command = connection, layout, on_command
        self._events: _Events[receive.Command] = _Events(machine.handle, self._do)
        self._open: dict[int, Operation] = {}
        self._checksums = machine.reservation.checksums
        self._arriving: dict[RegionName, ArrivingPages] = {
            "blocks": ArrivingPages(layout, "blocks"),
            "slots": ArrivingPages(layout, "slots"),
        }

    def feed(self, event: object) -> None:
        """Raises IllegalTransition for events that only a bug of the caller's can bring here."""
        self._events.feed(event)

    def _do(self, command: receive.Command) -> None:
        match command:
            case PostReceives():
                self._post(command)
            case CancelReceives():
                for batch in command.batches:
                    if batch in self._open:
                        self._connection.cancel(self._open[batch])
            case Verify():
                self._verify(command)
            case _:
                self._on_command(command)

    def _post(self, command: PostReceives) -> None:
        pieces: list[Piece] = []
        places: list[tuple[RegionName, int, int]] = []
        for copy, tag in command.copies:
            memory = self._layout.region(copy.region).memory
            for index, (start, length) in enumerate(cut(copy.num_bytes, self._connection.max_message_bytes)):
                offset = copy.target_offset + start
                pieces.append((memory[offset : offset + length], tag + index))
                places.append((copy.region, offset, length))
        operation = self._connection.post_receive(pieces, (lambda index: self._arrived(*places[index])) if self._checksums else None)
        self._open[command.batch] = operation
        operation.when_finished(lambda ended: self._ended(command.batch, ended))

    def _arrived(self, region: RegionName, offset: int, num_bytes: int) -> None:
        self._arriving[region].arrived(offset, num_bytes)

    def _ended(self, batch: int, operation: Operation) -> None:
        del self._open[batch]
        self.feed(receive.CopiesEnded(batch, operation.error))

    def _verify(self, command: Verify) -> None:
        blocks = tuple(self._checksum("blocks", block) for block in command.blocks)
        self.feed(receive.Verified(blocks, self._checksum("slots", command.slot)))

    def _checksum(self, region: RegionName, page: int) -> int:
        checksum = self._arriving[region].checksum(page)
        assert checksum is not None, f"{region}[{page}] is to be verified before it has arrived"
        return checksum


class SendSession:
    """One hand-off on P.

    The worker's commands: Compute (submit it), Refuse (tell the router), Say (to D), GrantLease/EndLease (``Leases``),
    Ended (free the pages).
    """

    def __init__(self, machine: send.HandoffSender, layout: Layout, on_command: Callable[[SendCommand], None]) -> None:
        self.machine = machine
        self.connection: Connection | None = None
        """To D; set it before feeding D's messages."""
        self._layout, self._on_command = layout, on_command
        self._events: _Events[send.Command] = _Events(machine.handle, self._do)

    def feed(self, event: object) -> None:
        """Raises IllegalTransition for events that only a bug of the caller's can bring here."""
        self._events.feed(event)

    def _do(self, command: send.Command) -> None:
        if isinstance(command, PostSends):
            self._send(command)
        else:
            self._on_command(command)

    def _send(self, command: PostSends) -> None:
        assert self.connection is not None, "D pulls from a P that isn't connected to it"
        pieces: list[Piece] = []
        for copy in command.copies:
            memory = self._layout.region(copy.region).memory[copy.offset : copy.offset + copy.num_bytes]
            pieces += [
                (memory[start : start + length], copy.tag + index)
                for index, (start, length) in enumerate(cut(copy.num_bytes, self.connection.max_message_bytes))
            ]
        operation = self.connection.send(pieces)
        operation.when_finished(lambda ended: self.feed(send.CopiesEnded(command.batch, ended.error)))
