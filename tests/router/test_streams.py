"""Streamed answers: what is on the wire, in which order."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from protocol.messages import Admit, TokenLogprob
from tests.router.harness import Harness, Script, events

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_completion_stream(harness: Harness) -> None:
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    response = await harness.complete(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    assert text_of(chunks) == " the cat"
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert all(chunk["object"] == "text_completion" and chunk["model"] == "tiny" for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks[:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    # one chunk a token; EOS, which has no text, comes with the reason
    assert len(chunks[:-1]) == len(harness.ids(" the cat")) + 1


async def test_chat_stream_begins_with_the_first_token(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("ok then")
    chunks = events(await harness.chat(stream=True))
    assert text_of(chunks) == "ok then"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["content"]
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_the_last_token_of_max_tokens_comes_with_the_reason(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat")
    chunks = events(await harness.complete(stream=True, max_tokens=1))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks[:-1]] == [(" the", "length")]


async def test_first_token_is_eos(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("")
    (chunk, done) = events(await harness.chat(stream=True))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_usage_comes_last_and_alone(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat")
    chunks = events(await harness.complete(stream=True, stream_options={"include_usage": True}))
    assert chunks[-2]["choices"] == []
    num_output = len(harness.ids(" the cat")) + 1
    assert chunks[-2]["usage"]["completion_tokens"] == num_output
    assert chunks[-2]["usage"]["total_tokens"] == num_output + len(harness.ids("hello world"))
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


async def test_continuous_usage_counts_up(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await harness.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    num_output = len(harness.ids(" the cat")) + 1
    assert counts == [*range(1, num_output + 1), num_output]


async def test_emoji_split_over_tokens(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("a🎉é\u2028b")
    chunks = events(await harness.complete(stream=True))
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert texts == ["a", "🎉", "é", "\u2028", "b", ""]


async def test_stop_string_is_never_shown_and_taken_back(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat sat on the mat", pause_s=0.01)
    chunks = events(await harness.complete(stream=True, max_tokens=30, stop="at on", stream_options={"include_usage": True}))
    assert text_of(chunks[:-1]) == " the cat s"
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-3]["choices"][0]["stop_reason"] == "at on"
    assert chunks[-2]["usage"]["completion_tokens"] == len(harness.ids(" the cat sat on"))


async def test_n_and_batch_are_interleaved_and_complete(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_running": 8})
    decode.script = lambda admit: Script(
        [(token,) for token in harness.ids(f" {admit.token_ids[0]}+{admit.sampling.seed}")], "length", pause_s=0.01
    )
    response = await harness.complete([[11, 12], [21, 22]], n=2, seed=3, stream=True, max_tokens=9, stream_options={"include_usage": True})
    chunks = events(response)
    assert [text_of(chunks[:-1], index) for index in range(4)] == [" 11+3", " 11+4", " 21+3", " 21+4"]
    order = [chunk["choices"][0]["index"] for chunk in chunks[:-2]]
    assert order != sorted(order)
    finished = [chunk["choices"][0]["index"] for chunk in chunks[:-2] if chunk["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    assert chunks[-2]["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_token_ids(harness: Harness, path: str) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x🎉")
    ask = harness.complete if path == "completions" else harness.chat
    chunks = events(await ask(stream=True, return_token_ids=True))
    token_ids = [token_id for chunk in chunks[:-1] for token_id in chunk["choices"][0]["token_ids"]]
    assert token_ids == [*harness.ids("x🎉"), harness.eos]
    first = chunks[0]["choices"][0] if path == "completions" else chunks[0]
    assert first["prompt_token_ids"] == list((await decode.expect(Admit)).token_ids)
    assert json.dumps(chunks[1:]).count("prompt_token_ids") == 0


async def test_logprobs_of_each_chunk(harness: Harness) -> None:
    decode = await harness.decode()
    tokens = harness.ids(" the cat")
    logprobs = [TokenLogprob(token_id=token, logprob=-1.0, top=((token, -1.0),)) for token in tokens]
    decode.script = lambda admit: Script([(token,) for token in tokens], "length", logprobs=logprobs)
    chunks = events(await harness.complete(stream=True, max_tokens=len(tokens), logprobs=1))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [entry["tokens"] for entry in found] == [[" the"], [" cat"]]
    assert [entry["text_offset"] for entry in found] == [[0], [4]]
    chunks = events(await harness.chat(stream=True, max_tokens=len(tokens), logprobs=True))
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in chunks[:-1]] == [" the", " cat"]


async def test_echo(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    assert text_of(events(await harness.complete("the", echo=True, stream=True))) == "the cat"


async def test_tool_calls_come_whole(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_model_len": 1000})
    call = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
    decode.script = harness.says(f"Look: {call}\n{call}", per_step=2)
    chunks = events(await harness.chat(stream=True, tools=TOOLS))
    assert text_of(chunks) == "Look:"
    calls = [call for chunk in chunks[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert all(call["function"] == {"name": "bash", "arguments": '{"cmd": "ls"}'} for call in calls)
    assert len({call["id"] for call in calls}) == 2
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_nothing_is_sent_before_the_first_token(harness: Harness) -> None:
    decode = await harness.decode()
    asking = asyncio.create_task(harness.complete(stream=True, max_tokens=1))
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    done, _ = await asyncio.wait([asking], timeout=0.1)
    assert not done
    await decode.tokens(admit.key, 0, harness.ids(" cat"))
    await decode.finish(admit.key, "length")
    assert text_of(events(await asking)) == " cat"
