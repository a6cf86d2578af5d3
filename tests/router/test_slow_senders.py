"""Clients that connect and then send nothing, or half a request: they can't hold a connection for ever."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.harness import Harness, Script, StartRouter, events, within

TIMEOUT_S = 0.3
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": [7, 8], "max_tokens": 1}).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
async def impatient(start_router: StartRouter) -> Harness:
    return await start_router(receive_timeout_s=TIMEOUT_S)


async def talk(harness: Harness, *pieces: bytes) -> bytes:
    """Send the pieces; everything that comes until the server closes."""
    _, _, address = harness.router.url.partition("//")
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await within(reader.read())
    finally:
        writer.close()


async def test_a_silent_client_is_let_go_without_a_word(impatient: Harness) -> None:
    assert await talk(impatient) == b""


@pytest.mark.parametrize("half", [b"POST /v1/comp", HEAD, WHOLE[:-3]], ids=["line", "head", "body"])
async def test_half_a_request_is_answered_with_its_own_status(impatient: Harness, half: bytes) -> None:
    head, _, body = (await talk(impatient, half)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert f"{TIMEOUT_S} s" in error["message"]


async def test_an_answer_may_take_longer_and_the_next_request_on_the_connection_is_bounded_again(impatient: Harness) -> None:
    decode = await impatient.decode()
    decode.script = lambda admit: Script([(9,)] * 4, "length", pause_s=TIMEOUT_S / 2)
    answer = await talk(impatient, WHOLE.replace(b'"max_tokens": 1', b'"max_tokens": 4'), HEAD)
    first, _, second = answer.partition(b"HTTP/1.1 408 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in first.replace(b" ", b"")
    assert b"request_timeout" in second


async def test_connections_in_use_stay(impatient: Harness) -> None:
    """One after the other on one connection, for longer than the bound."""
    decode = await impatient.decode()
    decode.script = lambda admit: Script([(9,)] * 3, "length", pause_s=TIMEOUT_S / 2)
    for _ in range(3):
        assert events(await impatient.complete(stream=True, max_tokens=3))[-1] == "[DONE]"
