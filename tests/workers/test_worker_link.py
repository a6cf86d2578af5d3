"""The worker's side of the conversation with the router, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.codec import decode_from_worker, encode
from protocol.errors import Unwelcomed
from protocol.ids import Epoch, RequestId
from protocol.messages import (
    Cancel,
    Capacity,
    Fingerprint,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    Load,
    Message,
    Unwelcome,
    Welcome,
    WorkerToRouter,
)
from protocol.sockets import Hub, Link
from protocol.worker_link import Order, WorkerLink
from tests.workers.together import PATIENCE_S, until

EPOCH = Epoch("worker-life")
FINGERPRINT = Fingerprint(
    model_type="nemotron_h",
    config_digest="c",
    weights_digest="w",
    dtype="float32",
    state_dtype="float32",
    block_tokens=16,
    block_bytes=1,
    slot_bytes=1,
    layout_digest="l",
    mtp=True,
)
HELLO = Hello(
    epoch=EPOCH,
    worker_id="p0",
    role="prefill",
    fingerprint=FINGERPRINT,
    capacity=Capacity(max_model_len=8, kv_blocks=2, state_slots=3, max_running=1, speculation=0),
)


class Router:
    """The other end: a bound Hub with an epoch."""

    def __init__(self, epoch: str, address: str = "tcp://127.0.0.1:0") -> None:
        self.epoch = Epoch(epoch)
        self.hub = Hub(address)

    async def next(self, kind: type[Message]) -> Message:
        """The next message of this kind; others are skipped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                identity, data = await self.hub.recv()
                assert identity == EPOCH.encode()
                message: WorkerToRouter = decode_from_worker.decode(data)
                if isinstance(message, kind):
                    return message

    async def tell(self, message: Message) -> None:
        assert await self.hub.send(EPOCH.encode(), encode(message))


class Worker:
    def __init__(self, address: str, health_file: Path | None = None) -> None:
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.gone = 0
        self.link = WorkerLink(
            Link(address, EPOCH.encode()),
            hello=HELLO,
            heartbeat=lambda: Heartbeat(epoch=EPOCH, load=Load(running=3)),
            on_message=self.orders.put_nowait,
            on_router_gone=self._on_gone,
            health_file=health_file,
        )

    def _on_gone(self) -> None:
        self.gone += 1


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.link.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Unwelcomed):
            await task
        worker.link.close()


async def test_says_hello_then_beats() -> None:
    router = Router("r1")
    async with running(Worker(router.hub.address)) as task:
        assert await router.next(Hello) == HELLO
        await router.tell(Welcome(epoch=router.epoch, heartbeat_s=0.05))
        for _ in range(3):
            assert await router.next(Heartbeat) == Heartbeat(epoch=EPOCH, load=Load(running=3))
        assert not task.done()
    router.hub.close()


async def test_the_health_file_is_fresh_only_while_the_router_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "health"
    router = Router("r1")
    async with running(Worker(router.hub.address, file)):
        await router.next(Hello)
        assert not file.exists()
        await router.tell(Welcome(epoch=router.epoch, heartbeat_s=0.02))
        await router.next(Heartbeat)
        await until(file.exists)
        router.hub.close()
        await until(lambda: "lost the connection" in caplog.text)
        file.unlink(missing_ok=True)
        await asyncio.sleep(0.3)
        assert not file.exists()


async def test_orders_of_another_router_are_dropped() -> None:
    router = Router("r1")
    worker = Worker(router.hub.address)
    async with running(worker):
        await router.next(Hello)
        await router.tell(Welcome(epoch=router.epoch))
        await router.tell(Cancel(epoch=Epoch("r0"), request_id=RequestId("stale"), generation=0))
        await router.tell(Cancel(epoch=router.epoch, request_id=RequestId("now"), generation=0))
        async with asyncio.timeout(PATIENCE_S):
            order = await worker.orders.get()
        assert isinstance(order, Cancel)
        assert order.request_id == "now"
        assert worker.orders.empty()
    router.hub.close()


async def test_says_hello_again_to_a_restarted_router_and_drops_its_work_once() -> None:
    first = Router("r1")
    worker = Worker(first.hub.address)
    async with running(worker):
        await first.next(Hello)
        await first.tell(Welcome(epoch=first.epoch, heartbeat_s=0.05))
        await first.next(Heartbeat)
        first.hub.close()
        second = Router("r2", first.hub.address)
        await second.next(Heartbeat)
        for _ in range(2):  # an answer to each message that it couldn't place
            await second.tell(HelloAgain(epoch=second.epoch))
        await second.next(Hello)
        await second.tell(Welcome(epoch=second.epoch, heartbeat_s=0.05))
        await second.next(Heartbeat)
        assert worker.gone >= 1
        assert worker.link.welcomed
        second.hub.close()


async def test_unwelcome_ends_the_link_with_the_field() -> None:
    router = Router("r1")
    async with running(Worker(router.hub.address)) as task:
        await router.next(Hello)
        await router.tell(Unwelcome(epoch=router.epoch, field="weights_digest", message="another model"))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Unwelcomed, match=r"weights_digest.*another model"):
                await task
    router.hub.close()


async def test_goodbye_comes_after_everything_else() -> None:
    router = Router("r1")
    worker = Worker(router.hub.address)
    async with running(worker):
        await router.next(Hello)
        await router.tell(Welcome(epoch=router.epoch, heartbeat_s=60))
        await router.next(Heartbeat)
        worker.link.beat()
        await worker.link.leave()
        await router.next(Heartbeat)
        assert await router.next(Goodbye) == Goodbye(epoch=EPOCH)
    router.hub.close()


async def test_nobody_there_is_said_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.worker_link.FIRST_PAUSE_S", 0.05)
    async with running(Worker("tcp://127.0.0.1:9")):
        await until(lambda: "no answer from the router at tcp://127.0.0.1:9" in caplog.text)
