"""Impossible values are 400s that name the field, before any worker hears of them; what isn't served is refused, not ignored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.messages import Admit
from tests.router.harness import MODEL_LEN, Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def refused(harness: Harness, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    response = await harness.client.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert all(not worker.got(Admit) for worker in harness.workers)
    assert isinstance(error, dict)
    return error


SAMPLING = [
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", "five", "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", MODEL_LEN, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 1000, "min_tokens"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", 1.5, "min_p"),
    ("seed", 2**63, "seed"),
    ("seed", 0.5, "seed"),
    ("n", 0, "n"),
    ("n", 1000, "n"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", ["x" * 2000], "stop"),
    ("stop_token_ids", [320], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", ["a"], "stop_token_ids.0"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("logit_bias", {"a": 1}, "logit_bias.a"),
    ("logit_bias", {"320": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", [1], "logit_bias"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
]


async def test_impossible_values_name_their_field(harness: Harness) -> None:
    await harness.decode()
    for field, value, param in SAMPLING:
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": USER})):
            error = await refused(harness, path, {**body, field: value})
            assert error["param"] == param, error
            assert field in error["message"], error
    for path, field, value in (
        (COMPLETIONS, "logprobs", 21),
        (COMPLETIONS, "logprobs", -1),
        (COMPLETIONS, "echo", "yes"),
        (CHAT, "messages", "hi"),
        (CHAT, "tools", "bash"),
    ):
        error = await refused(harness, path, {"prompt": "hi", "messages": USER, field: value})
        assert error["param"] == field, error
    error = await refused(harness, CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21})
    assert error["param"] == "top_logprobs"
    error = await refused(harness, CHAT, {"messages": USER, "top_logprobs": 2})
    assert error["param"] == "top_logprobs"


UNSERVED = [
    (COMPLETIONS, "suffix", " end"),
    (COMPLETIONS, "best_of", 2),
    (COMPLETIONS, "prompt_logprobs", 1),
    (COMPLETIONS, "use_beam_search", True),
    (COMPLETIONS, "guided_regex", "a+"),
    (COMPLETIONS, "response_format", {"type": "json_object"}),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "bash"}}),
    (CHAT, "functions", [{"name": "bash"}]),
    (CHAT, "echo", True),
    (CHAT, "chat_template", "{{ 1 }}"),
    (CHAT, "continue_final_message", True),
    (CHAT, "modalities", ["text", "audio"]),
]


async def test_what_isnt_served_is_refused(harness: Harness) -> None:
    await harness.decode()
    for path, field, value in UNSERVED:
        error = await refused(harness, path, {"prompt": "hi", "messages": USER, field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_value")
    error = await refused(harness, COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 1})
    assert error["param"] == "echo"
    assert "not served" in error["message"]


async def test_what_asks_for_nothing_is_accepted(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("ok")
    fields: dict[str, Any] = {"response_format": {"type": "text"}, "best_of": 1, "suffix": "", "guided_json": None, "echo": False}
    assert (await harness.complete(**fields)).status_code == 200
    assert (await harness.chat(**fields, tool_choice="auto", functions=[])).status_code == 200


WRONG_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    ([[]], "prompt.0"),
    ([320], "prompt"),
    ([-1], "prompt"),
    ([True], "prompt.0"),
    ([1, "a"], "prompt.0"),
    (["a", ""], "prompt"),
    (["a", 1], "prompt.1"),
    ([1.5], "prompt.0"),
    (7, "prompt"),
    ({"text": "a"}, "prompt"),
]


async def test_wrong_prompts(harness: Harness) -> None:
    for prompt, param in WRONG_PROMPTS:
        assert (await refused(harness, COMPLETIONS, {"prompt": prompt}))["param"] == param


async def test_missing_fields(harness: Harness) -> None:
    assert (await refused(harness, COMPLETIONS, {}))["param"] == "prompt"
    assert (await refused(harness, CHAT, {}))["param"] == "messages"
    assert (await refused(harness, "/detokenize", {}))["param"] == "tokens"


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ([{}], "messages.0.role"),
    ([{"role": 5, "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages.0.content.0.text"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages.0.tool_calls.0.function.arguments",
    ),
    ([{"role": "assistant", "tool_calls": [{"type": "function"}]}], "messages.0.tool_calls.0.function"),
    ([{"role": "strange", "content": "x"}], "messages"),
]


async def test_wrong_messages(harness: Harness) -> None:
    for messages, param in WRONG_MESSAGES:
        assert (await refused(harness, CHAT, {"messages": messages}))["param"] == param


async def test_a_prompt_at_or_over_the_limit(harness: Harness) -> None:
    await harness.decode()
    for num_tokens in (MODEL_LEN, MODEL_LEN + 1, MODEL_LEN * 10):
        error = await refused(harness, COMPLETIONS, {"prompt": [7] * num_tokens, "max_tokens": 1})
        assert error["code"] == "context_length_exceeded"
        assert str(MODEL_LEN) in error["message"]


async def test_text_that_is_surely_too_long_isnt_tokenised(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prompts.tokenize_text", None)
    error = await refused(harness, COMPLETIONS, {"prompt": "hello " * 100_000})
    assert error["code"] == "context_length_exceeded"


async def test_chat_that_is_too_long(harness: Harness) -> None:
    error = await refused(harness, CHAT, {"messages": [{"role": "user", "content": "🎉" * MODEL_LEN}]})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_the_longest_possible_request(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x")
    assert (await harness.complete([7] * (MODEL_LEN - 1), max_tokens=1)).status_code == 200


async def test_bodies_that_are_no_json_object(harness: Harness) -> None:
    for data in (b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000):
        response = await harness.client.post(COMPLETIONS, content=data)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"


async def test_a_body_that_is_too_large(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.front.MAX_BODY_BYTES", 1000)
    error = await refused(harness, COMPLETIONS, {"prompt": "x" * 2000}, status=413)
    assert error["code"] == "body_too_large"


async def test_another_model(harness: Harness) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        error = await refused(harness, path, {"model": "gpt", "prompt": "x", "messages": USER}, status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert (await harness.client.get("/v1/models/gpt")).status_code == 404


async def test_paths_and_methods_that_dont_exist(harness: Harness) -> None:
    for response, status in (
        (await harness.client.get("/v2/nothing"), 404),
        (await harness.client.get(COMPLETIONS), 405),
        (await harness.client.put("/v1/models"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_one_wrong_prompt_of_a_batch_stops_all(harness: Harness) -> None:
    await harness.decode()
    await refused(harness, COMPLETIONS, {"prompt": [[1, 2], [1, 999]]})
    await asyncio.sleep(0.05)
    assert not harness.workers[0].got(Admit)
