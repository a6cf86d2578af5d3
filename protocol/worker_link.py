"""A worker's side of its conversation with the router: dial, hello, heartbeats, hello again after the router restarted.

What every worker does is here; what a message about a request means is the worker's own business (``on_message``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from protocol.codec import decode_from_router, encode
from protocol.errors import Unwelcomed, WireError
from protocol.ids import Epoch
from protocol.messages import (
    Admit,
    Cancel,
    Drain,
    FlushCache,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    Message,
    Peers,
    Prefill,
    RouterToWorker,
    Unwelcome,
    Welcome,
)
from protocol.sockets import HEARTBEAT_S, Link

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 15.0
"""Between one hello and the next, as long as nobody answers."""
GOODBYE_MS = 500
"""How long the last messages may take to leave this host."""
MAX_BATCH = 64
"""Messages that travel together at most."""

Order = Peers | Admit | Prefill | Cancel | FlushCache | Drain
"""What the router may want of a worker once it knows it."""

log = logging.getLogger("baton.link")


class WorkerLink:
    """One worker's link to the router.

    ``on_message`` gets the orders of the router that welcomed us; ``on_router_gone`` is called when that router has forgotten us or
    is another process now: nobody wants the results of its requests any more. ``health_file`` is touched with each
    heartbeat while the connection stands.
    """

    def __init__(
        self,
        link: Link,
        *,
        hello: Hello,
        heartbeat: Callable[[], Heartbeat],
        on_message: Callable[[Order], None],
        on_router_gone: Callable[[], None],
        health_file: Path | None = None,
    ) -> None:
        self._link = link
        self._hello = hello
        self._heartbeat = heartbeat
        self._on_message = on_message
        self._on_router_gone = on_router_gone
        self._health_file = health_file
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._router: Epoch | None = None
        """The router that welcomed us last."""
        self._welcome = asyncio.Event()
        self._forgotten = asyncio.Event()
        """The opposite of ``_welcome``."""
        self._forgotten.set()
        self._heartbeat_s = HEARTBEAT_S
        self._linger_ms = 0
        self._connected = False

    def send(self, message: Message) -> None:
        """In order, never blocks."""
        self._outbox.put_nowait(encode(message))

    def beat(self) -> None:
        """A heartbeat out of turn: something changed that the router should know at once."""
        if self._welcome.is_set():
            self.send(self._heartbeat())
            if self._health_file is not None and self._connected:
                self._health_file.touch()

    @property
    def welcomed(self) -> bool:
        return self._welcome.is_set()

    async def run(self) -> None:
        """Until cancelled. Raises Unwelcomed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_outbox())
                tasks.create_task(self._receive())
                tasks.create_task(self._greet())
                tasks.create_task(self._beat())
                tasks.create_task(self._link.watch(self._on_connection))
        except* Unwelcomed as group:
            raise group.exceptions[0] from None

    async def leave(self) -> None:
        """Goodbye, after all that was sent before it. Call while ``run`` runs, and ``close`` afterwards."""
        self.send(Goodbye(epoch=self._hello.epoch))
        await self._outbox.join()
        self._linger_ms = GOODBYE_MS

    def close(self) -> None:
        self._link.close(self._linger_ms)

    async def _send_outbox(self) -> None:
        """What one engine step gives all its requests goes out together: per message, sending costs more than everything before it."""
        while True:
            batch = [await self._outbox.get()]
            while len(batch) < MAX_BATCH and not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            if not await self._link.send(*batch):
                log.warning("the router at %s reads nothing: %d messages were dropped", self._link.address, len(batch))
            for _ in batch:
                self._outbox.task_done()

    async def _receive(self) -> None:
        while True:
            data = await self._link.recv()
            try:
                message: RouterToWorker = decode_from_router.decode(data)
            except WireError as error:
                log.error("dropped a message from the router: %s", error)
                continue
            self._handle(message)

    def _handle(self, message: RouterToWorker) -> None:
        match message:
            case Welcome():
                self._on_welcome(message)
            case Unwelcome():
                raise Unwelcomed(message.field, message.message)
            case HelloAgain():
                self._on_hello_again()
            case _ if message.epoch != self._router:
                log.warning("dropped %s from router %s, which didn't welcome us", message.type, message.epoch)
            case _:
                self._on_message(message)

    def _on_welcome(self, message: Welcome) -> None:
        known, self._router = self._router, message.epoch
        self._heartbeat_s = message.heartbeat_s
        if not self._welcome.is_set():
            log.info("welcomed by the router at %s", self._link.address)
            self._welcome.set()
            self._forgotten.clear()
        if known not in (None, message.epoch):
            self._on_router_gone()

    def _on_hello_again(self) -> None:
        if not self._welcome.is_set():
            return  # our hello is on its way; this answers something that we sent before it
        log.warning("the router at %s doesn't know this worker (any more): saying hello again", self._link.address)
        self._welcome.clear()
        self._forgotten.set()
        self._on_router_gone()

    def _on_connection(self, stands: bool) -> None:
        if self._connected and not stands:
            log.warning("lost the connection to the router at %s: dialing again", self._link.address)
        self._connected = stands

    async def _greet(self) -> None:
        while True:
            await self._forgotten.wait()
            await self._say_hello()

    async def _say_hello(self) -> None:
        """Until welcomed. A hello waits until the router can be reached; it is repeated in case that a router died with it."""
        waited_s, pause_s = 0.0, FIRST_PAUSE_S
        while not self._welcome.is_set():
            self.send(self._hello)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # not wait_for: 3.11's may swallow a cancel
                    await self._welcome.wait()
                    return
            waited_s += pause_s
            log.warning("no answer from the router at %s for %.0f s: still dialing", self._link.address, waited_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _beat(self) -> None:
        while True:
            await self._welcome.wait()
            self.beat()
            await asyncio.sleep(self._heartbeat_s)
