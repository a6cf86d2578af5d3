"""Workers that die, refuse or talk nonsense, and clients that leave: one clear ending, and nobody works on for nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from protocol.codec import encode
from protocol.messages import (
    Admit,
    Admitted,
    Cancel,
    Cancelled,
    ErrorCode,
    Failed,
    Heartbeat,
    Hello,
    HelloAgain,
    Load,
    Paired,
    Peers,
    Prefill,
    Refused,
    TokenLogprob,
    Tokens,
    Unwelcome,
    Welcome,
)
from tests.router.harness import FakeDecode, FakePrefill, Harness, fingerprint, until, within


class Stream:
    """A streamed completion that a test reads event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines: AsyncIterator[str] = response.aiter_lines()

    async def next(self) -> Any:
        """None at the end."""
        async for line in self._lines:
            if line:
                assert line.startswith("data: ")
                return line[6:] if line == "data: [DONE]" else json.loads(line[6:])
        return None


async def prefilling(harness: Harness) -> tuple[FakePrefill, FakeDecode, Admit, asyncio.Task[httpx.Response]]:
    """A request that P works on. It may be asked for again."""
    if not harness.workers:
        await harness.pair()
    prefill, decode = harness.workers
    assert isinstance(prefill, FakePrefill)
    assert isinstance(decode, FakeDecode)
    prefill.hold = True
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    await prefill.expect(Prefill)
    return prefill, decode, admit, asking


async def begin(harness: Harness, decode: FakeDecode, count: int = 1) -> list[Admit]:
    """The first token of the first of so many sequences, which a stream's headers wait for."""
    admits = [await decode.expect(Admit) for _ in range(count)]
    for admit in admits:
        await decode.admit(admit)
    await decode.tokens(admits[0].key, 0, harness.ids(" cat"))
    return admits


async def error_of(asking: asyncio.Task[httpx.Response], status: int) -> Any:
    response = await within(asking)
    assert response.status_code == status, response.text
    return response.json()["error"]


# ---- workers that die


async def test_decode_dies_before_the_first_token(harness: Harness) -> None:
    prefill, decode, _, whole = await prefilling(harness)
    streamed = asyncio.create_task(harness.complete(stream=True))
    await decode.admit(await decode.expect(Admit))
    await prefill.expect(Prefill)
    await decode.die()
    for asking in (whole, streamed):
        error = await error_of(asking, 502)
        assert error["code"] == "decode_lost"
        assert "no heartbeat" in error["message"]
        await prefill.expect(Cancel)


async def test_decode_dies_in_the_middle_of_a_stream(harness: Harness) -> None:
    _, decode = await harness.pair()
    beginning = asyncio.create_task(begin(harness, decode))
    async with harness.client.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True}) as response:
        stream = Stream(response)
        assert (await stream.next())["choices"][0]["text"] == " cat"
        await beginning
        await decode.die()
        assert (await within(stream.next()))["error"]["code"] == "decode_lost"
        assert await stream.next() is None, "no finish and no [DONE] after an error"
    assert await harness.metric('baton_requests_total{ending="failed_decode_lost"}') == 1


async def gone(harness: Harness, worker_id: str, **changes: Any) -> FakeDecode:
    """A worker whose connection is closed and that the router doesn't miss yet."""
    decode = await harness.decode(worker_id, **changes)
    await decode.die()
    send = harness.router.cluster.members._transport.send
    await until(lambda: not send(decode.epoch.encode(), b"are you there?"))
    assert any(worker.worker_id == worker_id for worker in harness.router.cluster.table)
    return decode


async def test_a_request_that_never_got_to_a_worker_goes_to_another(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    (await harness.decode("d1")).script = harness.says(" cat")
    await gone(harness, "d0")
    for response in await asyncio.gather(harness.complete(), harness.complete(stream=True)):
        assert response.status_code == 200, response.text
    await until(lambda: len(harness.router.cluster.table) == 1)
    assert "lost decode worker d0 with 0 requests: it can't be reached" in caplog.text


async def test_a_request_that_never_got_to_a_worker_waits_for_the_others(harness: Harness) -> None:
    decode = await harness.decode("d1", capacity={"max_running": 1})
    running = asyncio.create_task(harness.complete())
    first = await decode.expect(Admit)
    await gone(harness, "d0")
    waiting = asyncio.create_task(harness.complete())
    await until(lambda: len(harness.router.cluster.table) == 1)
    assert len(harness.router.cluster._queue) == 1
    await decode.admit(first)
    await decode.tokens(first.key, 0, (7,))
    await decode.finish(first.key)
    decode.script = harness.says(" cat")
    assert [(await asked).status_code for asked in (running, waiting)] == [200, 200]


async def test_a_waiting_request_that_cant_be_delivered_waits_on_once(harness: Harness) -> None:
    """It is found out while the queue is gone through."""
    decode = await harness.decode("d1", capacity={"max_running": 1})
    running = asyncio.create_task(harness.complete())
    first = await decode.expect(Admit)
    waiting = asyncio.create_task(harness.complete())
    await until(lambda: len(harness.router.cluster._queue) == 1)
    transport = harness.router.cluster.members._transport
    real = transport.send
    refusals: list[bytes] = []

    def send(identity: bytes, message: bytes) -> bool:
        if identity == late.epoch.encode() and b"admit" in message:
            refusals.append(message)
            return False
        return real(identity, message)

    late = await harness.decode("d0", join=False)
    transport.send = send  # type: ignore[method-assign]
    await late.greet()
    await until(lambda: refusals)
    transport.send = real  # type: ignore[method-assign]
    assert len(harness.router.cluster._queue) == 1
    decode.script = harness.says(" cat")
    await decode.admit(first)
    await decode.tokens(first.key, 0, (7,))
    await decode.finish(first.key)
    assert [(await asked).status_code for asked in (running, waiting)] == [200, 200]


async def test_a_request_that_never_got_to_the_only_worker_has_no_capacity(harness: Harness) -> None:
    await gone(harness, "d0")
    response = await harness.complete()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_capacity"


@pytest.mark.parametrize("worker_leaves", [False, True])
async def test_while_the_server_stops_its_workers_stop_too(harness: Harness, worker_leaves: bool) -> None:
    """Whatever they say then, the client reads why."""
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete(stream=True))
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await until(lambda: next(iter(harness.router.cluster._requests.values())).life.num_tokens)
    harness.router._server.leave(at_once=False)
    if worker_leaves:
        await decode.leave()
    else:
        await decode.send(Cancelled(**decode.about(admit.key)))
    error = json.loads((await asking).text.rstrip().rpartition("data: ")[2])["error"]
    assert (error["code"], error["message"]) == ("stopping", "the server is stopping")


async def test_an_unknown_worker_is_warned_of_once(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    stranger = await harness.decode(join=False)
    for _ in range(3):
        await stranger.beat()
    await until(lambda: harness.router.cluster._metrics.dropped["unknown"] == 3)
    assert caplog.text.count("hasn't said hello") == 1


async def test_why_workers_arent_paired_is_told_by_name(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = await harness.pair()
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=False, reason="no answer"))
    await until(lambda: "isn't paired" in caplog.text)
    entry = next(entry for entry in caplog.records if "isn't paired" in entry.getMessage())
    assert (entry.levelname, entry.getMessage()) == ("ERROR", "d1 isn't paired with p0: no answer".replace("p0", prefill.worker_id))
    await prefill.stop_beating()
    await prefill.leave()
    await until(lambda: not harness.router.cluster.table.prefills)
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=False, reason="it left"))
    await until(lambda: "it left" in caplog.text)
    assert next(entry for entry in caplog.records if "it left" in entry.getMessage()).levelname == "INFO"


async def test_prefill_dies(harness: Harness) -> None:
    prefill, decode, _, asking = await prefilling(harness)
    await prefill.die()
    assert (await error_of(asking, 502))["code"] == "prefill_lost"
    await decode.expect(Cancel)
    await until(lambda: decode.got(Peers) and decode.got(Peers)[-1].prefill == ())


async def test_prefill_may_die_once_tokens_come(harness: Harness) -> None:
    prefill, decode, admit, asking = await prefilling(harness)
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await prefill.die()
    await until(lambda: not harness.router.cluster.table.prefills)
    await decode.finish(admit.key)
    assert (await asking).json()["choices"][0]["text"] == " cat"


async def test_the_rest_of_the_cluster_goes_on(harness: Harness) -> None:
    first, second = await harness.decode("d0"), await harness.decode("d1")
    second.script = harness.says(" cat", pause_s=0.1)
    doomed, lucky = asyncio.create_task(harness.complete()), asyncio.create_task(harness.complete())
    await first.expect(Admit)
    await first.die()
    statuses = sorted([(await doomed).status_code, (await lucky).status_code])
    assert statuses == [200, 502]
    assert (await harness.complete()).status_code == 200


async def test_a_silent_worker_is_lost_and_may_come_back(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.stop_beating()
    assert (await error_of(asking, 502))["code"] == "decode_lost"
    await decode.send(Admitted(**decode.about(admit.key), needs_prefill=False))
    await decode.beat()
    await decode.expect(HelloAgain)
    await decode.expect(Welcome)
    decode.script = harness.says(" cat")
    assert (await harness.complete()).status_code == 200


async def test_the_same_worker_started_anew_replaces_its_former_life(harness: Harness) -> None:
    old = await harness.decode("d")
    asking = asyncio.create_task(harness.complete())
    admit = await old.expect(Admit)
    new = await harness.decode("d")
    assert (await error_of(asking, 502))["message"].endswith("it was started anew")
    await old.beat()
    await old.expect(HelloAgain)
    assert (await old.expect(Unwelcome)).field == "worker_id"
    await old.admit(admit)
    new.script = harness.says(" cat")
    assert (await harness.complete()).status_code == 200
    assert [worker.epoch for worker in harness.router.cluster.table] == [new.epoch]


async def test_a_worker_that_says_goodbye_is_gone_at_once(harness: Harness) -> None:
    decode = await harness.decode()
    await decode.stop_beating()
    await decode.leave()
    await until(lambda: not len(harness.router.cluster.table))
    assert await harness.metric('baton_workers_lost_total{role="decode"}') == 0


async def test_hello_twice_is_the_same_worker(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.say_hello()
    await decode.expect(Welcome)
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await decode.finish(admit.key)
    assert (await asking).status_code == 200


async def test_a_router_that_was_held_up_blames_nobody(harness: Harness) -> None:
    await harness.decode()
    time.sleep(1.7)  # noqa: ASYNC251  (the point of this test)
    await asyncio.sleep(0.3)
    assert len(harness.router.cluster.table) == 1


# ---- workers that refuse or fail


async def test_prefill_refuses(harness: Harness) -> None:
    codes: list[tuple[ErrorCode, int]] = [("busy", 429), ("bad_request", 400), ("draining", 503), ("internal", 500)]
    for code, status in codes:
        prefill, decode, admit, asking = await prefilling(harness)
        await prefill.send(Refused(**prefill.about(admit.key), code=code, message="not that one"))
        error = await error_of(asking, status)
        assert (error["code"], error["message"]) == (code, "not that one")
        assert (await decode.expect(Cancel)).key == admit.key


async def refuse_pair(prefill: FakePrefill, message: Prefill) -> None:
    await prefill.send(Refused(**prefill.about(message.key), code="decode_lost", message="it isn't paired with this worker"))


async def test_a_request_whose_pair_doesnt_stand_goes_to_another(harness: Harness) -> None:
    prefill, first = await harness.pair()
    second = await harness.decode("other")
    prefill.partners.append(second)
    second.script = harness.says(" cat")
    await until(lambda: all(worker.paired for worker in harness.router.cluster.table.decodes))
    prefill.hold = True
    asking = asyncio.create_task(harness.complete())
    admit = await first.expect(Admit)
    await first.admit(admit)
    message = await prefill.expect(Prefill)
    prefill.hold = False
    await refuse_pair(prefill, message)
    assert (await within(asking)).status_code == 200
    assert (await first.expect(Cancel)).key == admit.key
    assert (await prefill.expect(Prefill)).decode_epoch == second.epoch
    assert not prefill.got(Cancel)
    worker = harness.router.cluster.table.get(first.epoch)
    assert worker is not None
    assert worker.unpaired == {prefill.epoch: "it isn't paired with this worker"}
    await first.send(Paired(epoch=first.epoch, peer=prefill.epoch, ok=True))
    await until(lambda: worker.paired)
    assert await harness.metric("baton_prompt_tokens_total") == len(admit.token_ids)


async def test_a_pair_is_asked_once_for_one_request_whatever_d_reports(harness: Harness) -> None:
    """Without another pair, D computes the prompt."""
    prefill, decode = await harness.pair()
    prefill.hold = True
    asking = asyncio.create_task(harness.complete())
    await decode.admit(await decode.expect(Admit))
    await refuse_pair(prefill, await prefill.expect(Prefill))
    admit = await decode.expect(Admit)
    assert (admit.generation, admit.prefill) == (1, None)
    await decode.send(Refused(**decode.about(admit.key), code="busy", message="no room"))
    await until(lambda: harness.router.cluster._queue)
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=True))
    admit = await decode.expect(Admit)
    assert (admit.generation, admit.prefill) == (2, None)
    assert harness.router.cluster.table.decodes[0].paired == {prefill.epoch}
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await decode.finish(admit.key)
    assert (await within(asking)).json()["choices"][0]["text"] == " cat"


async def test_what_goes_wrong_in_the_middle_ends_the_request_and_tells_its_workers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, decode = await harness.pair()
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)

    def fails(message: BaseModel) -> bytes:
        if isinstance(message, Prefill):
            raise OverflowError("Integer value out of range")
        return encode(message)

    monkeypatch.setattr("router.membership.encode", fails)
    await decode.admit(admit)
    assert (await error_of(asking, 500))["code"] == "internal"
    assert (await decode.expect(Cancel)).key == admit.key
    assert "ADMITTING -> FILLING" in caplog.text
    assert not any(worker.requests for worker in harness.router.cluster.table)


async def test_decode_refuses_for_good(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.send(Refused(**decode.about(admit.key), code="bad_request", message="9 blocks are too many"))
    assert (await error_of(asking, 400))["message"] == "9 blocks are too many"


async def test_decode_fails_before_the_first_token(harness: Harness) -> None:
    codes: list[tuple[ErrorCode, int]] = [("transfer_failed", 502), ("lease_ended", 502), ("mismatch", 502), ("internal", 500)]
    for code, status in codes:
        prefill, decode, admit, asking = await prefilling(harness)
        await decode.send(Failed(**decode.about(admit.key), code=code, message="checksum of block 3"))
        assert (await error_of(asking, status))["code"] == code
        await prefill.expect(Cancel)


async def test_prefill_fails_or_drops_it(harness: Harness) -> None:
    prefill, decode, admit, asking = await prefilling(harness)
    await prefill.send(Cancelled(**prefill.about(admit.key)))
    assert "dropped" in (await error_of(asking, 500))["message"]
    await decode.expect(Cancel)


async def test_one_choice_that_fails_ends_all(harness: Harness) -> None:
    decode = await harness.decode()
    beginning = asyncio.create_task(begin(harness, decode, 2))
    async with harness.client.stream("POST", "/v1/completions", json={"prompt": "hello", "n": 2, "stream": True}) as response:
        stream = Stream(response)
        assert (await stream.next())["choices"][0]["text"] == " cat"
        first, second = await beginning
        await decode.send(Failed(**decode.about(second.key), code="internal", message="broken"))
        assert (await within(stream.next()))["error"]["message"] == "broken"
        assert await stream.next() is None, "no finish and no [DONE] after an error"
    assert (await decode.expect(Cancel)).key == first.key


# ---- nonsense


async def test_a_gap_or_a_repeat_is_a_failure(harness: Harness) -> None:
    decode = await harness.decode()
    for index in (1, 3):
        asking = asyncio.create_task(harness.complete())
        admit = await decode.expect(Admit)
        await decode.admit(admit)
        await decode.tokens(admit.key, 0, (7, 8))
        await decode.tokens(admit.key, index, (9,))
        assert "gap" in (await error_of(asking, 500))["message"]
        await decode.expect(Cancel)


async def test_messages_out_of_turn_end_the_request(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.finish(admit.key)
    assert "Finished out of turn" in (await error_of(asking, 500))["message"]
    await decode.expect(Cancel)


async def test_what_the_router_cant_use_costs_only_its_own_request(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    decode = await harness.decode()
    broken, fine = asyncio.create_task(harness.complete([1], logprobs=1)), asyncio.create_task(harness.complete([2]))
    admits = {admit.token_ids[0]: admit for admit in [await decode.expect(Admit), await decode.expect(Admit)]}
    for admit in admits.values():
        await decode.admit(admit)
    await decode.tokens(admits[1].key, 0, (7, 8), [TokenLogprob(token_id=7, logprob=-1.0)])
    await decode.tokens(admits[2].key, 0, harness.ids(" cat"))
    await decode.finish(admits[2].key)
    assert "can't use" in (await error_of(broken, 500))["message"]
    assert (await fine).json()["choices"][0]["text"] == " cat"
    assert (await decode.expect(Cancel)).key == admits[1].key
    assert "1 log-probabilities for 2 tokens" in caplog.text


async def test_stale_and_foreign_messages_are_dropped_and_counted(harness: Harness) -> None:
    decode, stranger = await harness.decode("d0"), await harness.decode("d1")
    asking = asyncio.create_task(harness.complete())
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    good = decode.about(admit.key)
    for message in (
        Tokens(**good | {"generation": 7}, index=0, token_ids=(9,)),
        Tokens(**good | {"request_id": "nobody"}, index=0, token_ids=(9,)),
        Tokens(**good | {"epoch": stranger.epoch}, index=0, token_ids=(9,)),
    ):
        await decode.send(message)
    await stranger.tokens(admit.key, 0, (9,))
    await until(lambda: harness.router.cluster._metrics.dropped["foreign"] == 1)
    await decode.send_raw(b"\x00 not a message")
    await decode.send_raw(encode(Heartbeat(epoch=decode.epoch, load=Load())).replace(b"heartbeat", b"heartbeet"))
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await decode.finish(admit.key)
    assert (await asking).json()["choices"][0]["text"] == " cat"
    counts = [
        await harness.metric(f'baton_messages_dropped_total{{reason="{reason}"}}')
        for reason in ("stale", "ended", "foreign", "undecodable")
    ]
    assert counts == [2, 1, 1, 2]


async def test_a_stranger_is_asked_for_its_hello(harness: Harness) -> None:
    stranger = await harness.decode(join=False)
    await stranger.greet()
    await stranger.expect(Welcome)
    unknown = await harness.decode(join=False)
    unknown._tasks.append(asyncio.create_task(unknown._receive()))
    await unknown.beat()
    await unknown.expect(HelloAgain)
    await unknown.expect(Welcome)


# ---- workers that don't fit


async def test_a_worker_that_differs_isnt_welcome(harness: Harness) -> None:
    await harness.decode()
    differences: list[dict[str, Any]] = [
        {"protocol_version": 99},
        {"model_type": "llama"},
        {"weights_digest": "other"},
        {"layout_digest": "other"},
        {"mtp": False},
        {"dtype": "float64"},
    ]
    for changes in differences:
        stranger = await harness.prefill(join=False, prints=fingerprint(**changes))
        await stranger.greet()
        unwelcome = await stranger.expect(Unwelcome)
        assert [unwelcome.field] == list(changes)
    assert len(harness.router.cluster.table) == 1


async def test_a_worker_with_another_vocabulary_isnt_welcome(harness: Harness) -> None:
    stranger = await harness.decode(join=False)
    stranger.info = {"vocab_size": "5"}
    await stranger.greet()
    assert (await stranger.expect(Unwelcome)).field == "vocab_size"


async def test_a_prefill_worker_needs_an_address(harness: Harness) -> None:
    stranger = await harness.decode(join=False)
    hello = {"worker_id": "p", "role": "prefill", "fingerprint": fingerprint(), "capacity": stranger.capacity}
    stranger._tasks.append(asyncio.create_task(stranger._receive()))
    for address in (None, "", "garbage", "tcp://", "tcp://h:70000", "ipc:///tmp/x", "tcp://a b:1", "tcp://h:1\n"):
        await stranger.send(Hello.model_validate({"epoch": stranger.epoch, "peer_address": address, **hello}))
        assert (await stranger.expect(Unwelcome)).field == "peer_address"


async def test_decode_workers_hear_of_every_change_among_prefill_workers(harness: Harness) -> None:
    decode = await harness.decode()
    assert (await decode.expect(Peers)).prefill == ()
    prefill = await harness.prefill()
    (place,) = (await decode.expect(Peers)).prefill
    assert (place.epoch, place.worker_id, place.address) == (prefill.epoch, prefill.worker_id, "tcp://127.0.0.1:1")
    await prefill.stop_beating()
    await prefill.leave()
    assert (await decode.expect(Peers)).prefill == ()


# ---- clients that leave


@pytest.mark.parametrize("stage", ["asked", "prefilling", "decoding"])
async def test_a_client_leaves(harness: Harness, stage: str) -> None:
    prefill, decode = await harness.pair()
    prefill.hold = True
    for count, stream in enumerate((False, True), start=1):
        asking = asyncio.create_task(harness.complete(stream=stream))
        admit = await decode.expect(Admit)
        if stage != "asked":
            await decode.admit(admit)
            await prefill.expect(Prefill)
        if stage == "decoding":
            await decode.tokens(admit.key, 0, (7,))
            await until(lambda: next(iter(harness.router.cluster._requests.values())).life.num_tokens)
        asking.cancel()
        assert (await decode.expect(Cancel)).key == admit.key
        if stage == "prefilling":
            assert (await prefill.expect(Cancel)).key == admit.key
        await until(lambda: not harness.router.cluster.num_requests)
        assert await harness.metric('baton_requests_total{ending="cancelled"}') == count
        await decode.send(Cancelled(**decode.about(admit.key)))
    await until(lambda: harness.router.cluster._metrics.dropped["ended"] == 2)


async def test_a_client_that_leaves_cancels_all_its_choices(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete([[1, 2], [3, 4]], n=2))
    admits = {(await decode.expect(Admit)).key for _ in range(4)}
    asking.cancel()
    assert {(await decode.expect(Cancel)).key for _ in range(4)} == admits


async def test_a_client_that_doesnt_read_loses_its_stream(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.MAX_UNSENT_CHARACTERS", 1000)
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete(stream=True, max_tokens=100))
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, (20,))
    await until(lambda: harness.router.cluster._requests[admit.request_id].life.num_tokens)
    for index in range(1, 20):  # at once: the writer gets no turn in between
        message = Tokens(**decode.about(admit.key), index=index, token_ids=(20,))
        harness.router.cluster.on_message(decode.epoch.encode(), encode(message))
    assert "slow_client" in (await asking).text
    await decode.expect(Cancel)


async def test_200_requests_cancelled_at_random_leave_nothing(harness: Harness) -> None:
    """The harness checks the bookings; here each worker must have heard of every ending that it didn't bring about itself."""
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat sat on the mat", pause_s=0.005)
    dice = random.Random(1)
    for _ in range(10):
        asked = [asyncio.create_task(harness.complete(stream=dice.random() < 0.5)) for _ in range(20)]
        for asking in dice.sample(asked, len(asked)):
            await asyncio.sleep(dice.random() * 0.01)
            asking.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: not harness.router.cluster.num_requests)
    await until(lambda: not decode.playing)
    assert not harness.router.cluster._queue
