"""Impossible values are 400s that name the field, before any worker hears of them; what isn't served is refused, not ignored."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import encode
from protocol.ids import RequestId, new_epoch
from protocol.messages import Admit
from router.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from router.chat_messages import check_tools, checked_message
from router.errors import ApiError
from router.json_text import JsonAnswer
from router.model_files import ModelFiles, load_model_files
from router.parameters import TextRules, sampling_params
from router.prompts import Prompt
from tests.router.harness import MODEL_LEN, Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def refused(harness: Harness, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    response = await harness.client.post(path, content=json.dumps(body))  # httpx can't encode all that JSON can say
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
    ("repetition_penalty", 1e-320, "repetition_penalty"),
    ("repetition_penalty", 0.0099, "repetition_penalty"),
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


async def test_some_token_must_be_left_to_choose(harness: Harness) -> None:
    everything = list(range(320))
    everything.remove(harness.eos)
    body = {"prompt": "hi", "messages": USER, "stop_token_ids": everything, "min_tokens": 1}
    for path in (COMPLETIONS, CHAT):
        error = await refused(harness, path, body)
        assert (error["param"], error["code"]) == ("stop_token_ids", "invalid_value")
    (await harness.decode()).script = harness.says("x")
    for change in ({"ignore_eos": True}, {"min_tokens": 0}, {"stop_token_ids": everything[1:]}):
        assert (await harness.client.post(COMPLETIONS, json={**body, **change})).status_code == 200


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


ARGUMENTS = "messages.0.tool_calls.0.function.arguments"
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
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}], ARGUMENTS),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '"\\ud800"'}}]}],
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}],
        "messages.0.tool_calls.0.function.arguments",
    ),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "messages.0.tool_calls.0.function.name"),
    ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}], "messages.0.tool_calls.0.id"),
    ([{"role": "assistant", "tool_calls": [5]}], "messages.0.tool_calls.0"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages.0.tool_call_id"),
    ([{"role": "strange", "content": "x"}], "messages"),
]


async def test_wrong_messages(harness: Harness) -> None:
    for messages, param in WRONG_MESSAGES:
        for path in (CHAT, "/tokenize"):
            assert (await refused(harness, path, {"messages": messages}))["param"] == param


WRONG_TOOLS: list[tuple[Any, str]] = [
    ([5], "tools.0"),
    ([{}], "tools.0.type"),
    ([{"type": "web_search"}], "tools.0.type"),
    ([{"type": "function"}], "tools.0.function"),
    ([{"type": "function", "function": 5}], "tools.0.function"),
    ([{"type": "function", "function": {}}], "tools.0.function.name"),
    ([{"type": "function", "function": {"name": 5}}], "tools.0.function.name"),
    ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools.0.function.description"),
    ([{"type": "function", "function": {"name": "f", "parameters": 5}}], "tools.0.function.parameters"),
]


async def test_wrong_tools(harness: Harness) -> None:
    for tools, param in WRONG_TOOLS:
        for body in ({"tools": tools}, {"tools": tools, "tool_choice": "none"}):
            assert (await refused(harness, CHAT, {"messages": USER, **body}))["param"] == param
        assert (await refused(harness, "/tokenize", {"messages": USER, "tools": tools}))["param"] == param


async def test_switches_that_the_template_has_already(harness: Harness) -> None:
    for name in ("messages", "tools", "documents", "self", "raise_exception", "range"):
        error = await refused(harness, CHAT, {"messages": USER, "chat_template_kwargs": {name: 1}})
        assert error["param"] == f"chat_template_kwargs.{name}"
    error = await refused(harness, CHAT, {"messages": USER, "chat_template_kwargs": {"add_generation_prompt": 1}})
    assert error["param"] == "chat_template_kwargs.add_generation_prompt"


HALF = "a\ud800"
NOT_UNICODE: list[tuple[str, Any, str]] = [
    (COMPLETIONS, {"prompt": HALF}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", HALF]}, "prompt.1"),
    (COMPLETIONS, {"prompt": "a", "stop": HALF}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {HALF: 1}}, "logit_bias.a\\ud800"),
    (COMPLETIONS, {"prompt": "a", "model": HALF}, "model"),
    (COMPLETIONS, {"prompt": "a", "unknown": [{"x": HALF}]}, "unknown.0.x"),
    (COMPLETIONS, {"prompt": "a", HALF: 1}, "a\\ud800"),
    (COMPLETIONS, {"prompt": "a", "suffix": "\udc00\ud800"}, "suffix"),
    (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": HALF, "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": HALF}}]}, "tools.0.function.name"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"x": HALF}}, "chat_template_kwargs.x"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
    ("/detokenize", {"tokens": [HALF]}, "tokens.0"),
]


async def test_half_a_surrogate_pair_is_no_text(harness: Harness) -> None:
    for path, body, param in NOT_UNICODE:
        error = await refused(harness, path, body)
        assert error["param"] == param
        assert "valid Unicode" in error["message"]


async def test_a_whole_surrogate_pair_is_a_character(harness: Harness) -> None:
    for data in (b'{"prompt": "\\ud83c\\udf89"}', '{"prompt": "🎉"}'.encode()):
        body = (await harness.client.post("/tokenize", content=data)).json()
        assert body["tokens"] == list(harness.ids("🎉"))


async def test_whatever_an_error_says_can_be_sent() -> None:
    error = ApiError(400, "a\ud800", param="b\udfff", code="invalid_value")
    sent = json.loads(bytes(JsonAnswer(error.body()).body))
    assert (sent["error"]["message"], sent["error"]["param"]) == ("a\ud800", "b\udfff")


ANYTHING: list[Any] = [
    5, -5, 0, 0.5, True, None, "x", "", "5", [], [5], ["x"], [None], [[]], [{}], {}, {"x": 1}, {"5": 1}, {"x": {"y": True}},
    2**31, 2**32, 2**63, 2**64, -(2**63), -(2**64), 10**400, -(10**400), 1e308, [2**64], [-(2**64)], {"5": 2**64}, {"5": 10**400},
    {str(2**64): 1}, {"9" * 5000: 1}, {"٣": 1}, {"05": 1}, {"-1": 1},
]  # fmt: skip
PYTHON = re.compile(r"True|False|None|dictionary|instance|StreamOptions|Body|\bstr\b|\bint\b|\bdict\b|\blist\[|tuple|Error|Value error")


def test_any_value_of_any_field_is_taken_or_refused_by_its_name(model_dir: Path) -> None:
    """Nothing of it is a fault of ours, and what is said has no words of Python and no parts that the client didn't send."""
    files = load_model_files(model_dir, None)
    for cls, base in (
        (CompletionBody, {"prompt": "hi"}),
        (ChatBody, {"messages": USER}),
        (TokenizeBody, {"prompt": "hi"}),
        (DetokenizeBody, {"tokens": [5]}),
    ):
        for field in cls.model_fields:
            for value in ANYTHING:
                error = refusal(cls, {**base, field: value}, files)
                if error is not None:
                    where = rf"{field}|top_logprobs|{field}\.[x0-9٣.-]+(role|type|function|content)?"
                    assert re.fullmatch(where, error.param or ""), (field, value, error)
                    assert not PYTHON.search(error.message), error
                    assert (error.param or "").split(".")[0] in error.message, error


def refusal(cls: type[Body], raw: Any, files: ModelFiles) -> ApiError | None:
    try:
        use(parse_body(cls, raw), files)
    except ApiError as error:
        return error
    return None


def use(body: Body, files: ModelFiles) -> None:
    """Up to what a worker would get."""
    if isinstance(body, CompletionBody | ChatBody):
        sampling = sampling_params(body, Prompt((1,), "a"), files, MODEL_LEN)
        TextRules.of(body, sampling, files.eos_token_ids)
        encode(Admit(epoch=new_epoch(), request_id=RequestId("r"), generation=0, token_ids=(1,), sampling=sampling))
    if isinstance(body, ChatBody | TokenizeBody):
        check_tools(body.tools or ())
        for message in body.messages or ():
            checked_message(message, "messages.0")


async def test_max_tokens_is_blamed_for_itself(harness: Harness) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        for path in (COMPLETIONS, CHAT):
            for value in (-1, 0, 2**64, 10**400):
                error = await refused(harness, path, {"prompt": "a", "messages": USER, name: value})
                assert error["param"] == name
                assert "min_tokens" not in error["message"]


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
        assert response.json()["error"]["code"] == {404: "not_found", 405: "method_not_allowed"}[status]


async def test_one_wrong_prompt_of_a_batch_stops_all(harness: Harness) -> None:
    await harness.decode()
    await refused(harness, COMPLETIONS, {"prompt": [[1, 2], [1, 999]]})
    await asyncio.sleep(0.05)
    assert not harness.workers[0].got(Admit)
