"""The transport's part of a hand-off: runs a lifecycle's copies and checksums, and passes on what is the worker's to do.

``ReceiveSession`` on D, ``SendSession`` on P: ``feed`` them events, get the worker's commands through ``on_command``, in order. Both live
on the asyncio loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from protocol.regions import RegionName
from transfer import receive, send
from transfer.checksums import ArrivingPages
from transfer.commands import CancelReceives, Commit, Compute, Ended, EndLease, Fail, GrantLease, PostReceive, PostSend, Refuse, Say, Verify
from transfer.layout import Layout
from transfer.transport import Connection, Operation

CommandT = TypeVar("CommandT")
ReceiveCommand = Say | Fail | Commit | Ended
SendCommand = Say | Compute | Refuse | GrantLease | EndLease | Ended


class _Events(Generic[CommandT]):
    """Feeds a lifecycle one event at a time: what happens while its commands are being done waits for its turn."""

    def __init__(self, handle: Callable[[object], Sequence[CommandT]], do: Callable[[CommandT], None]) -> None:
        self._handle, self._do = handle, do
        self._waiting: deque[object] = deque()
        self._busy = False

    def feed(self, event: object) -> None:
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                for command in self._handle(self._waiting.popleft()):
                    self._do(command)
        finally:
            self._busy = False


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
        self.machine = machine
        self._connection, self._layout, self._on_command = connection, layout, on_command
        self._events: _Events[receive.Command] = _Events(machine.handle, self._do)
        self._open: dict[int, Operation] = {}
        self._arriving: dict[RegionName, ArrivingPages] = {
            "blocks": ArrivingPages(layout, "blocks"),
            "slots": ArrivingPages(layout, "slots"),
        }

    def feed(self, event: object) -> None:
        """Raises IllegalTransition for events that only a bug of the caller's can bring here."""
        self._events.feed(event)

    def _do(self, command: receive.Command) -> None:
        match command:
            case PostReceive():
                self._post(command)
            case CancelReceives():
                for tag in command.tags:
                    if tag in self._open:
                        self._connection.cancel(self._open[tag])
            case Verify():
                self._verify(command)
            case _:
                self._on_command(command)

    def _post(self, command: PostReceive) -> None:
        memory = self._layout.region(command.region).memory[command.offset : command.offset + command.num_bytes]
        operation = self._connection.post_receive(memory, command.tag)
        self._open[command.tag] = operation
        operation.when_finished(lambda ended: self._ended(command, ended))

    def _ended(self, command: PostReceive, operation: Operation) -> None:
        self._open.pop(command.tag, None)
        if operation.error is None and self.machine.reservation.checksums:
            self._arriving[command.region].arrived(command.offset, command.num_bytes)
        self.feed(receive.CopyEnded(command.tag, operation.error))

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
        if isinstance(command, PostSend):
            self._send(command)
        else:
            self._on_command(command)

    def _send(self, command: PostSend) -> None:
        assert self.connection is not None, "D pulls from a P that isn't connected to it"
        memory = self._layout.region(command.region).memory[command.offset : command.offset + command.num_bytes]
        operation = self.connection.send(memory, command.tag)
        operation.when_finished(lambda ended: self.feed(send.CopyEnded(ended.tag, ended.error)))
