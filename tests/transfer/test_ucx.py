"""The UCX transport between two real processes, and its corners inside one."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest

from protocol.errors import PeerLost, TransferError
from transfer.bench import TwoProcesses
from transfer.bench_peer import Sizes
from transfer.transport import TransferCancelled
from transfer.ucx import MESSAGE_BYTES, UcxConnection, UcxTransport

SOON_S = 60.0


@pytest.fixture
async def pair() -> AsyncIterator[tuple[UcxConnection, UcxConnection]]:
    """(sender, receiver) with a transport each."""
    one, two = UcxTransport(), UcxTransport()
    yield one.connect(two.address), two.connect(one.address)
    one.close()
    two.close()


def patterned(size: int, start: int = 0) -> memoryview:
    return memoryview(bytearray((start + i) % 251 for i in range(size)))


@pytest.mark.parametrize("size", [1, 1000, 65536, MESSAGE_BYTES])
async def test_a_message_arrives(pair: tuple[UcxConnection, UcxConnection], size: int) -> None:
    sender, receiver = pair
    into = memoryview(bytearray(size))
    received, sent = receiver.post_receive([(into, 5)]), sender.send([(patterned(size), 5)])
    await asyncio.wait_for(asyncio.gather(received.wait(), sent.wait()), SOON_S)
    assert into == patterned(size)


async def test_messages_find_their_receives_in_any_order(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    pages = {tag: memoryview(bytearray(3000)) for tag in range(40)}
    sends = [sender.send([(patterned(3000, tag), tag)]) for tag in reversed(range(20))]
    receives = [receiver.post_receive([(page, tag)]) for tag, page in pages.items()]
    sends += [sender.send([(patterned(3000, tag), tag)]) for tag in range(20, 40)]
    await asyncio.wait_for(asyncio.gather(*(operation.wait() for operation in receives + sends)), SOON_S)
    assert all(page == patterned(3000, tag) for tag, page in pages.items())


async def test_a_cancelled_receive_ends_and_its_memory_is_left_alone(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    page = memoryview(bytearray(1000))
    receive = receiver.post_receive([(page, 9)])
    receiver.cancel(receive)
    with pytest.raises(TransferCancelled):
        await asyncio.wait_for(receive.wait(), SOON_S)
    late = sender.send([(patterned(1000), 9)])
    await asyncio.wait_for(late.wait(), SOON_S)
    again, sent = receiver.post_receive([(memoryview(bytearray(10)), 10)]), sender.send([(patterned(10), 10)])
    await asyncio.wait_for(asyncio.gather(again.wait(), sent.wait()), SOON_S)
    assert page == bytes(1000), "the late message went to scratch"


async def test_a_cancel_that_comes_too_late_changes_nothing_for_the_others(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    pages = [memoryview(bytearray(MESSAGE_BYTES)) for _ in range(8)]
    receives = [receiver.post_receive([(page, 20 + tag)]) for tag, page in enumerate(pages)]
    sends = [sender.send([(patterned(MESSAGE_BYTES, tag), 20 + tag)]) for tag in range(8)]
    for receive in receives[::2]:
        receiver.cancel(receive)
    ended = await asyncio.wait_for(asyncio.gather(*(operation.wait() for operation in receives + sends), return_exceptions=True), SOON_S)
    assert all(isinstance(error, TransferCancelled) for error in ended[:8:2])
    assert all(pages[tag] == patterned(MESSAGE_BYTES, tag) for tag in range(1, 8, 2))


async def test_a_longer_message_is_refused(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    page = memoryview(bytearray(100))
    receive, sent = receiver.post_receive([(page, 1)]), sender.send([(patterned(2000), 1)])
    with pytest.raises(TransferError, match="longer than 100 bytes"):
        await asyncio.wait_for(receive.wait(), SOON_S)
    await asyncio.wait_for(sent.wait(), SOON_S)
    assert page == bytes(100)


async def test_a_batch_ends_with_its_last_message_and_tells_of_each(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    pages = [memoryview(bytearray(500)) for _ in range(30)]
    arrived: list[int] = []
    receive = receiver.post_receive([(page, tag) for tag, page in enumerate(pages)], arrived.append)
    first = sender.send([(patterned(500, tag), tag) for tag in range(20)])
    await asyncio.wait_for(first.wait(), SOON_S)
    await asyncio.sleep(0.05)
    assert not receive.finished
    sender.send([(patterned(500, tag), tag) for tag in range(20, 30)])
    await asyncio.wait_for(receive.wait(), SOON_S)
    assert arrived == list(range(30))
    assert pages == [patterned(500, tag) for tag in range(30)]


async def test_a_batch_that_is_cancelled_half_way_ends_and_the_rest_is_left_alone(pair: tuple[UcxConnection, UcxConnection]) -> None:
    sender, receiver = pair
    pages = [memoryview(bytearray(500)) for _ in range(20)]
    receive = receiver.post_receive([(page, tag) for tag, page in enumerate(pages)])
    await asyncio.wait_for(sender.send([(patterned(500, tag), tag) for tag in range(10)]).wait(), SOON_S)
    receiver.cancel(receive)
    with pytest.raises(TransferCancelled):
        await asyncio.wait_for(receive.wait(), SOON_S)
    before = [bytes(page) for page in pages]
    await asyncio.wait_for(sender.send([(patterned(500, tag), tag) for tag in range(10, 20)]).wait(), SOON_S)
    await asyncio.sleep(0.05)
    assert [bytes(page) for page in pages] == before


async def test_closing_ends_everything(pair: tuple[UcxConnection, UcxConnection]) -> None:
    _, receiver = pair
    receives = [receiver.post_receive([(memoryview(bytearray(50)), tag)]) for tag in range(5)]
    receiver.close()
    assert all(isinstance(receive.error, TransferCancelled) for receive in receives)
    assert isinstance(receiver.post_receive([(memoryview(bytearray(50)), 6)]).error, TransferCancelled)


@pytest.mark.parametrize("address", [b"", b"x", b"not an address at all, but rather long"])
async def test_what_is_no_address_is_refused(address: bytes) -> None:
    transport = UcxTransport()
    with pytest.raises(TransferError, match="not a UCX address"):
        transport.connect(address)
    broken = transport.address[:-1] + b"\0"
    with pytest.raises(TransferError, match="not a UCX address"):
        transport.connect(broken if broken != transport.address else transport.address[:-1] + b"\1")
    transport.close()


async def test_waiting_costs_no_cpu(pair: tuple[UcxConnection, UcxConnection]) -> None:
    _, receiver = pair
    receiver.post_receive([(memoryview(bytearray(50)), 1)])
    await asyncio.sleep(0.2)
    shares = []
    for _ in range(5):  # something else of this process may be at work in one of them
        started, before = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.2)
        shares.append((time.process_time() - before) / (time.perf_counter() - started))
    assert min(shares) < 0.3, shares


async def test_fifty_megabytes_of_scattered_pages_arrive() -> None:
    """The harness compares every byte and raises TransferError for a difference."""
    async with TwoProcesses(Sizes()) as two:
        for _ in range(3):
            await two.handoff()
            assert two.session is not None
            assert two.session.machine.num_bytes == two.sizes.num_bytes > 50 * 10**6
            assert two.session.machine.in_flight == set()


@pytest.mark.parametrize("blocks", [40, 200])
async def test_a_sender_killed_in_the_middle_is_noticed_and_touches_nothing_afterwards(blocks: int) -> None:
    two = TwoProcesses(Sizes())
    async with two:
        running = asyncio.ensure_future(two.handoff())
        while not _has_begun(two, blocks):
            assert not running.done()
            await asyncio.sleep(0)
        assert two.session is not None
        machine = two.session.machine
        assert machine.in_flight, "too late to be a test"
        lost: list[str] = []
        two.connection.on_lost(lost.append)
        killed = time.perf_counter()
        two.peer.send_signal(signal.SIGKILL)
        with pytest.raises(TransferError):
            await asyncio.wait_for(running, SOON_S)
        while machine.in_flight or not lost:
            await asyncio.sleep(0.001)
            assert time.perf_counter() - killed < SOON_S
        pages = bytes(two.layout.blocks.memory)
        slots = bytes(two.layout.slots.memory)
        await asyncio.sleep(0.2)
        assert two.layout.blocks.memory == pages
        assert two.layout.slots.memory == slots
        assert isinstance(two.connection.post_receive([(memoryview(bytearray(5)), 1)]).error, PeerLost)
        await asyncio.to_thread(two.peer.wait)


def _has_begun(two: TwoProcesses, block: int) -> bool:
    """Bytes of the request's block of this index are there."""
    return two.session is not None and any(two.layout.page("blocks", two.session.machine.reservation.blocks[block])[:16])
