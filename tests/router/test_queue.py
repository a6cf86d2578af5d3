"""Too much work: busy workers, the queue, 429."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from protocol.codec import encode
from protocol.ids import RequestId
from protocol.messages import Admit, Cancel, Load, Refused, TokenLogprob
from protocol.sampling import SamplingParams
from router.events import Ending
from router.placement import DecodeView
from router.request import Order
from router.workers import Worker
from tests.router.harness import FakeDecode, Harness, StartRouter, until

ONE = {"max_running": 1}


async def busy(decode: FakeDecode, code: Any = "busy") -> Admit:
    admit = await decode.expect(Admit)
    await decode.send(Refused(**decode.about(admit.key), code=code, message="no room"))
    return admit


async def finish(harness: Harness, decode: FakeDecode) -> None:
    """Answer the oldest request by hand."""
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await decode.finish(admit.key)


def ask(harness: Harness, prompt: Any = "hi", **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(harness.complete(prompt, **fields))


async def test_another_worker_takes_what_a_busy_one_doesnt(harness: Harness) -> None:
    first, second = await harness.decode("d0"), await harness.decode("d1")
    asking = ask(harness)
    second.script = harness.says(" cat")
    refused = await busy(first)
    assert (await asking).json()["choices"][0]["text"] == " cat"
    assert (await second.expect(Admit)).generation == refused.generation + 1


async def test_a_draining_worker_isnt_asked_again(harness: Harness) -> None:
    first, second = await harness.decode("d0"), await harness.decode("d1")
    second.script = harness.says(" cat")
    asking = ask(harness)
    await busy(first, "draining")
    assert (await asking).status_code == 200
    first.draining = True
    assert (await harness.complete()).status_code == 200
    assert not first.got(Admit)


async def test_it_waits_when_all_are_busy_and_goes_on_when_one_has_room(harness: Harness) -> None:
    decode = await harness.decode()
    asking = ask(harness)
    await busy(decode)
    await until(lambda: harness.router.cluster._queue)
    assert await harness.metric("baton_requests_waiting") == 1
    decode.load = Load(free_blocks=999)
    await finish(harness, decode)
    assert (await asking).status_code == 200


async def test_a_busy_worker_isnt_pestered(harness: Harness) -> None:
    """It says Busy once; nothing is asked again while nothing has changed there."""
    decode = await harness.decode()
    running = ask(harness)
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    asking = ask(harness)
    await busy(decode)
    await asyncio.sleep(0.6)
    assert not decode.got(Admit)
    await decode.tokens(admit.key, 0, (7,))
    await decode.finish(admit.key)
    await finish(harness, decode)
    assert (await running).status_code == (await asking).status_code == 200


async def test_the_queue_is_first_in_first_out(harness: Harness) -> None:
    decode = await harness.decode(capacity=ONE)
    asked = []
    for number in range(3):
        asked.append(ask(harness, [10 + number]))
        await until(lambda: harness.router.cluster.num_requests == len(asked))
    for number in range(3):
        assert (await decode.expect(Admit)).token_ids == (10 + number,)
        await decode.beat()
        key = next(iter(harness.router.cluster._requests.values())).life
        about: Any = {"epoch": decode.epoch, "request_id": key.request_id, "generation": key.generation}
        await decode.send(Refused(**about, code="bad_request", message="no"))
        assert (await asked[number]).status_code == 400


async def test_one_that_doesnt_fit_doesnt_hold_up_the_others(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_running": 2})
    steady = ask(harness)
    await decode.admit(await decode.expect(Admit))
    large = ask(harness, [7] * 100)
    await busy(decode)
    small = ask(harness, [7])
    await finish(harness, decode)
    assert (await small).status_code == 200
    large.cancel()
    steady.cancel()
    await decode.expect(Cancel)


async def test_beyond_the_queue_is_429(start_router: StartRouter) -> None:
    harness = await start_router(queue_limit=1)
    decode = await harness.decode(capacity=ONE)
    running = ask(harness)
    admit = await decode.expect(Admit)
    waiting = ask(harness)
    await until(lambda: len(harness.router.cluster._queue) == 1)
    for stream in (False, True):
        response = await harness.complete(stream=stream)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert response.json()["error"]["code"] == "queue_full"
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, (7,))
    await decode.finish(admit.key)
    await finish(harness, decode)
    assert (await running).status_code == (await waiting).status_code == 200


async def test_a_batch_that_doesnt_fit_the_queue_is_given_up_whole(start_router: StartRouter) -> None:
    harness = await start_router(queue_limit=1)
    decode = await harness.decode(capacity=ONE)
    assert (await harness.complete(n=3)).status_code == 429
    assert (await decode.expect(Cancel)).key == (await decode.expect(Admit)).key
    assert harness.router.cluster.num_requests == 0


async def test_a_size_that_no_worker_holds_is_too_long(harness: Harness) -> None:
    await harness.decode(capacity={"kv_blocks": 3})
    response = await harness.complete([7] * 20, max_tokens=14)
    assert response.status_code == 400
    assert "33 tokens" in response.json()["error"]["message"]


async def test_no_decode_worker_is_503_with_its_reason(harness: Harness) -> None:
    await harness.prefill()
    for stream in (False, True):
        response = await harness.complete(stream=stream)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert response.json()["error"]["message"] == "no decode worker"


async def test_waiting_ones_fail_when_the_last_worker_leaves(harness: Harness) -> None:
    decode = await harness.decode(capacity=ONE)
    running = ask(harness)
    await decode.expect(Admit)
    waiting = ask(harness)
    await until(lambda: len(harness.router.cluster._queue) == 1)
    await decode.leave()
    assert (await running).status_code == 502
    assert (await waiting).status_code == 503


async def test_a_worker_that_joins_takes_waiting_requests(harness: Harness) -> None:
    await harness.decode(capacity=ONE)
    running = ask(harness)
    waiting = ask(harness)
    await until(lambda: len(harness.router.cluster._queue) == 1)
    second = await harness.decode()
    await finish(harness, second)
    done, _ = await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert (await done.pop()).status_code == 200
    running.cancel()
    waiting.cancel()


async def test_a_waiting_client_may_leave(harness: Harness) -> None:
    decode = await harness.decode(capacity=ONE)
    running = ask(harness)
    await decode.expect(Admit)
    waiting = ask(harness)
    await until(lambda: len(harness.router.cluster._queue) == 1)
    waiting.cancel()
    await until(lambda: not harness.router.cluster._queue)
    running.cancel()


async def test_the_deadline_holds_in_the_queue_and_on_a_worker(start_router: StartRouter) -> None:
    harness = await start_router(request_timeout_s=0.3)
    decode = await harness.decode(capacity=ONE)
    running, waiting = ask(harness), ask(harness)
    for asked in (running, waiting):
        response = await asked
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline"
    await decode.expect(Cancel)


async def fill(harness: Harness, count: int, first: int = 10) -> list[asyncio.Task[httpx.Response]]:
    """So many requests that wait, in this order."""
    asked: list[asyncio.Task[httpx.Response]] = []
    for number in range(count):
        asked.append(ask(harness, [first + number]))
        await until(lambda: len(harness.router.cluster._queue) == len(asked))
    return asked


async def test_one_that_cant_be_sent_doesnt_hold_up_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither those behind it nor what workers say meanwhile."""
    decode = await harness.decode(capacity=ONE)
    running = ask(harness, [7])
    admit = await decode.expect(Admit)
    broken, *others = await fill(harness, 3)

    def fails(message: BaseModel) -> bytes:
        if isinstance(message, Admit) and message.token_ids == (10,):
            raise OverflowError("Integer value out of range")
        return encode(message)

    monkeypatch.setattr("router.membership.encode", fails)
    decode.script = harness.says(" cat")
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, (7,))
    await decode.finish(admit.key)
    assert (await running).status_code == 200
    error = (await broken).json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal")
    assert [(await asked).status_code for asked in others] == [200, 200]
    assert "WAITING -> ADMITTING" in caplog.text
    assert "OverflowError" in caplog.text


async def test_what_goes_wrong_when_a_request_is_placed_at_once_is_its_own(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    with monkeypatch.context() as broken:
        broken.setattr("router.placer.place", None)
        assert (await harness.complete()).json()["error"]["code"] == "internal"
    assert (await harness.complete()).status_code == 200


async def test_a_message_that_cant_be_handled_doesnt_deafen_the_router(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    with monkeypatch.context() as broken:
        broken.setattr(harness.router.cluster.members, "on_message", None)
        await until(lambda: "can't be handled" in caplog.text)
    assert (await harness.complete()).status_code == 200


class Sinks:
    """Counts endings."""

    def __init__(self) -> None:
        self.num_ended = 0

    def on_begin(self, cached_tokens: int) -> None: ...

    def on_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None) -> bool:
        return False

    def on_end(self, ending: Ending) -> None:
        self.num_ended += 1


def submit(harness: Harness, sink: Sinks, count: int) -> list[RequestId]:
    names = [RequestId(f"r{number}") for number in range(count)]
    for name in names:
        harness.router.cluster.submit(Order(name, (7, 8), SamplingParams(max_tokens=2)), sink)
    return names


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Each worker of which a decode view was made since."""
    made: list[Worker] = []
    real = Worker.decode_view

    def counted(worker: Worker) -> DecodeView:
        made.append(worker)
        return real(worker)

    monkeypatch.setattr(Worker, "decode_view", counted)
    return made


async def test_2000_that_leave_at_once_cost_little(start_router: StartRouter, views: list[Worker]) -> None:
    """Those that wait need no new look at the workers; all those that ran need one together."""
    harness = await start_router(queue_limit=2000)
    decode = await harness.decode(capacity={"max_running": 8})
    await decode.stop_beating()
    sink = Sinks()
    names = submit(harness, sink, 2008)
    assert len(harness.router.cluster._queue) == 2000
    await asyncio.sleep(0)
    views.clear()
    for name in reversed(names[58:]):
        harness.router.cluster.cancel(name)
    assert len(harness.router.cluster._queue) == 50
    await asyncio.sleep(0)
    assert not views
    for name in names[:8]:
        harness.router.cluster.cancel(name)
    assert not views
    await asyncio.sleep(0)
    assert len(views) == 1 + 8, "one look, and one after each that was placed"
    assert len(harness.router.cluster._queue) == 42
    for name in names[8:58]:
        harness.router.cluster.cancel(name)
    assert sink.num_ended == 2008


async def test_one_that_comes_before_the_pass_doesnt_overtake(harness: Harness) -> None:
    decode = await harness.decode(capacity=ONE)
    sink = Sinks()
    first, second = submit(harness, sink, 2)
    cluster = harness.router.cluster
    cluster.cancel(first)
    cluster.submit(Order(RequestId("late"), (7,), SamplingParams(max_tokens=2)), sink)
    assert [request.order.request_id for request in cluster._queue.in_order()] == ["late"]
    for name in (second, RequestId("late")):
        cluster.cancel(name)
    asked = [(await decode.expect(Admit)).request_id for _ in range(2)]
    assert asked == [first, second]


async def test_one_that_is_sent_back_goes_before_younger_ones(harness: Harness) -> None:
    decode = await harness.decode(capacity=ONE)
    sink = Sinks()
    names = submit(harness, sink, 4)
    admit = await decode.expect(Admit)
    await decode.send(Refused(**decode.about(admit.key), code="busy", message="no room"))
    cluster = harness.router.cluster
    await until(lambda: len(cluster._queue) == 4)
    assert [request.order.request_id for request in cluster._queue.in_order()] == names
    for name in names:
        cluster.cancel(name)
