"""Too much work: busy workers, the queue, 429."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from protocol.messages import Admit, Cancel, Load, Refused
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
    refused = await busy(first)
    admit = second.expect(Admit)
    second.script = harness.says(" cat")
    assert (await asking).json()["choices"][0]["text"] == " cat"
    assert (await admit).generation == refused.generation + 1


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
