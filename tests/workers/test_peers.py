"""Pairing between D and P over real sockets: who pairs with whom, who is lost, and who is not listened to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from decode_worker.peers import Callbacks, Ourselves, PrefillPeers
from prefill_worker.peers import DecodePeers
from protocol.codec import decode_from_p, encode
from protocol.ids import Epoch, RequestId
from protocol.messages import (
    Fetch,
    Fingerprint,
    HandoffFailed,
    Message,
    NotPaired,
    PairHello,
    PeerPing,
    PeerPong,
    PrefillPlace,
    PrefillToDecode,
)
from protocol.sockets import Hub, Link
from tests.workers.together import PATIENCE_S, until
from transfer.loopback import Loopback, LoopbackTransport

P, D = Epoch("p-life"), Epoch("d-life")
OURS = Fingerprint(
    model_type="nemotron_h",
    config_digest="c",
    weights_digest="w",
    dtype="float32",
    state_dtype="float32",
    block_tokens=16,
    block_bytes=1024,
    slot_bytes=4096,
    layout_digest="l",
    mtp=True,
)
REQUEST: dict[str, Any] = {"request_id": RequestId("r"), "generation": 0}


class Pair:
    """One P and one D, and what each of them noticed, in order."""

    def __init__(self, d_fingerprint: Fingerprint = OURS, p_address: str = "tcp://127.0.0.1:0") -> None:
        network = Loopback()
        self.p_transport: LoopbackTransport = network.transport()
        self.d_transport: LoopbackTransport = network.transport()
        self.p_heard: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.d_heard: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.hub = Hub(p_address)
        self.p = DecodePeers(
            self.hub,
            self.p_transport,
            epoch=P,
            fingerprint=OURS,
            on_message=lambda peer, message: self.p_heard.put_nowait((peer.epoch, message)),
            on_lost=lambda epoch, reason: self.p_heard.put_nowait(("lost", reason)),
        )
        callbacks = Callbacks(
            on_message=lambda epoch, message: self.d_heard.put_nowait((epoch, message)),
            on_paired=lambda epoch: self.d_heard.put_nowait(("paired", epoch)),
            on_refused=lambda epoch, field, reason: self.d_heard.put_nowait((field, reason)),
            on_lost=lambda epoch, reason: self.d_heard.put_nowait(("lost", reason)),
        )
        self.d_tasks: list[asyncio.Task[None]] = []
        self.d = PrefillPeers(Ourselves(epoch=D, fingerprint=d_fingerprint, transport=self.d_transport), callbacks, self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.d_tasks.append(asyncio.create_task(work))
        return self.d_tasks[-1]

    def place(self, epoch: Epoch = P) -> PrefillPlace:
        return PrefillPlace(worker_id="p0", epoch=epoch, address=self.hub.address)


async def heard(queue: asyncio.Queue[tuple[str, object]]) -> tuple[str, object]:
    async with asyncio.timeout(PATIENCE_S):
        return await queue.get()


@contextlib.asynccontextmanager
async def meeting(d_fingerprint: Fingerprint = OURS) -> AsyncIterator[Pair]:
    pair = Pair(d_fingerprint)
    serving = asyncio.create_task(pair.p.run())
    try:
        yield pair
    finally:
        pair.d.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.sleep(0)
        pair.p.close()


async def test_paired_peers_talk_both_ways() -> None:
    async with meeting() as pair:
        pair.d.update((pair.place(),))
        assert await heard(pair.d_heard) == ("paired", P)
        assert pair.p.is_paired(D)
        assert pair.d.connection(P) is not None
        fetch = Fetch(epoch=D, **REQUEST)
        pair.d.say(P, fetch)
        assert await heard(pair.p_heard) == (D, fetch)
        failed = HandoffFailed(epoch=P, **REQUEST, code="internal", message="x")
        pair.p.say(D, failed)
        assert await heard(pair.d_heard) == (P, failed)


async def test_a_difference_is_told_to_both_and_nothing_is_connected() -> None:
    async with meeting(OURS.model_copy(update={"weights_digest": "another"})) as pair:
        pair.d.update((pair.place(),))
        field, reason = await heard(pair.d_heard)
        assert field == "weights_digest"
        assert "'another'" in str(reason)
        assert not pair.p.is_paired(D)
        pair.d.update((pair.place(),))  # a restarted router asks again
        assert (await heard(pair.d_heard))[0] == "weights_digest"


async def test_another_life_at_the_same_address_is_not_taken_for_the_one_that_was_named(caplog: pytest.LogCaptureFixture) -> None:
    async with meeting() as pair:
        pair.d.update((pair.place(Epoch("p-before")),))
        await until(lambda: "dropped pair_welcome from another life of p0" in caplog.text)
        assert pair.d.connection(Epoch("p-before")) is None
        assert pair.d_heard.empty()


async def test_a_dead_process_is_noticed_by_the_transport_and_paired_with_again() -> None:
    async with meeting() as pair:
        pair.d.update((pair.place(),))
        await heard(pair.d_heard)
        pair.p_transport.die()
        assert await heard(pair.d_heard) == ("lost", "the peer is dead")
        assert pair.d.connection(P) is None
        pair.p_transport.dead = False
        kind, reason = await heard(pair.p_heard)
        assert kind == "lost"
        assert reason in ("it pairs anew", "it can't be reached")  # whichever comes first
        assert await heard(pair.d_heard) == ("paired", P)


async def test_a_peer_that_dies_while_it_is_dismissed_is_not_dialed_again() -> None:
    """The cancel of its task and the loss meet in one task group."""
    async with meeting() as pair:
        pair.d.update((pair.place(),))
        await heard(pair.d_heard)
        pair.p_transport.die()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pair.d.update(())
        done, pending = await asyncio.wait(pair.d_tasks, timeout=PATIENCE_S)
        assert not pending
        assert len(done) == 1


async def test_a_peer_that_was_forgotten_pairs_anew_as_soon_as_it_speaks() -> None:
    """P gave D up while D was stopped; D believes in the pairing."""
    async with meeting() as pair:
        pair.d.update((pair.place(),))
        assert await heard(pair.d_heard) == ("paired", P)
        pair.p._peers.pop(D)  # without a word to the transport: over UCX a living peer doesn't notice a closed endpoint
        assert await heard(pair.d_heard) == ("lost", "it doesn't know this worker any more")
        assert await heard(pair.d_heard) == ("paired", P)
        assert pair.p.is_paired(D)


async def test_an_address_that_nobody_can_dial_is_refused_and_ends_nothing() -> None:
    async with meeting() as pair:
        bad = PrefillPlace(worker_id="p1", epoch=Epoch("bad"), address="garbage")
        pair.d.update((bad, pair.place()))
        said = {(await heard(pair.d_heard)), (await heard(pair.d_heard))}
        assert ("paired", P) in said
        assert any(one[0] == "peer_address" for one in said)


async def test_a_peer_that_falls_silent_is_lost() -> None:
    async with meeting() as pair:
        link = Link(pair.hub.address, D.encode())
        hello = PairHello(epoch=D, fingerprint=OURS, data_address=pair.d_transport.address, transport="loopback")
        await link.send(encode(hello))
        for _ in range(3):
            await link.send(encode(PeerPing(epoch=D)))
        async with asyncio.timeout(PATIENCE_S):
            answers: list[PrefillToDecode] = [decode_from_p.decode(await link.recv()) for _ in range(4)]
        assert [type(answer) for answer in answers[1:]] == [PeerPong] * 3
        kind, reason = await heard(pair.p_heard)
        assert kind == "lost"
        assert "nothing heard" in str(reason)
        assert not pair.p.is_paired(D)
        link.close()


async def test_only_paired_peers_under_their_own_name_are_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    async with meeting() as pair:
        link = Link(pair.hub.address, D.encode())
        strangers: list[Message | bytes] = [b"junk", Fetch(epoch=D, **REQUEST), Fetch(epoch=Epoch("somebody"), **REQUEST)]
        for message in strangers:
            await link.send(message if isinstance(message, bytes) else encode(message))
        await link.send(encode(PairHello(epoch=D, fingerprint=OURS, data_address=b"nowhere", transport="loopback")))
        async with asyncio.timeout(PATIENCE_S):
            told, answer = [decode_from_p.decode(await link.recv()) for _ in range(2)]
        assert told == NotPaired(epoch=P), "to the Fetch under its own name"
        assert answer.type == "pair_refused"
        assert answer.field == "data_address"
        assert pair.p_heard.empty()
        for words in ("dropped a message", "which isn't paired", "epoch somebody"):
            assert words in caplog.text
        link.close()


async def test_goodbye_comes_after_the_last_word() -> None:
    async with meeting() as pair:
        pair.d.update((pair.place(),))
        await heard(pair.d_heard)
        fetch = Fetch(epoch=D, **REQUEST)
        pair.d.say(P, fetch)
        await pair.d.leave()
        assert await heard(pair.p_heard) == (D, fetch)
        assert await heard(pair.p_heard) == ("lost", "it said goodbye")
