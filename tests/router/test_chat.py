"""POST /v1/chat/completions, not streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.messages import Admit, TokenLogprob
from tests.router.harness import MODEL_LEN, Harness, Script, StartRouter

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'


async def sent(harness: Harness, **body: Any) -> tuple[str, Any]:
    """The prompt that the worker got, with its special tokens, and the answer."""
    decode = await harness.decode()
    decode.script = decode.script or harness.says("ok")
    response = await harness.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    admit = await decode.expect(Admit)
    return harness.tokenizer.decode(admit.token_ids, skip_special_tokens=False), response.json()


async def test_messages_go_through_the_template(harness: Harness) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    prompt, body = await sent(harness, messages=messages, max_completion_tokens=5)
    assert prompt == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": harness.eos,
        }
    ]
    assert body["id"].startswith("chatcmpl-")


async def test_content_of_several_text_parts(harness: Harness) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt, _ = await sent(harness, messages=[{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in prompt


async def test_output_may_be_as_long_as_fits(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("ok")
    await harness.chat()
    admit = await decode.expect(Admit)
    assert admit.sampling.max_tokens == MODEL_LEN - len(admit.token_ids)


async def test_a_developer_is_the_system_for_a_template_that_knows_none(harness: Harness) -> None:
    prompt, _ = await sent(harness, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}])
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>")


async def test_the_generation_prompt_is_a_switch_too(harness: Harness) -> None:
    messages = [{"role": "user", "content": "hello"}]
    either: list[dict[str, Any]] = [{"add_generation_prompt": False}, {"chat_template_kwargs": {"add_generation_prompt": False}}]
    for fields in either:
        response = await harness.client.post("/tokenize", json={"messages": messages, **fields})
        prompt = harness.tokenizer.decode(response.json()["tokens"], skip_special_tokens=False)
        assert prompt.endswith("hello<|im_end|>\n")


async def test_arguments_of_calls_in_the_history_may_be_any_json_text(harness: Harness) -> None:
    for text in ('"ls"', "[1]", "5", "", "{}"):
        call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": text}}
        messages = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": [call]}]
        assert (await harness.client.post("/tokenize", json={"messages": messages})).status_code == 200


async def test_tool_calls_in_the_history(harness: Harness) -> None:
    function = {"name": "bash", "arguments": '{"cmd": "ls"}'}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "a.txt"},
    ]
    prompt, _ = await sent(harness, messages=messages)
    assert CALL in prompt
    assert "tool\na.txt" in prompt


async def test_a_call_in_the_answer(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_model_len": 1000})
    decode.script = harness.says(f"I look. {CALL}", per_step=3)
    body = (await harness.chat(tools=TOOLS)).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": json.dumps({"cmd": "ls"})}
    assert call["type"] == "function"
    prompt = harness.tokenizer.decode((await decode.expect(Admit)).token_ids)
    assert '"name": "bash"' in prompt


async def test_markup_is_text_when_no_tool_may_be_called(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_model_len": 1000})
    decode.script = harness.says(CALL)
    either: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in either:
        choice = (await harness.chat(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert '"bash"' not in harness.tokenizer.decode((await decode.expect(Admit)).token_ids)


async def test_only_one_call_if_asked_for(harness: Harness) -> None:
    decode = await harness.decode(capacity={"max_model_len": 1000})
    decode.script = harness.says(CALL + CALL)
    assert len((await harness.chat(tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"]) == 2
    choice = (await harness.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_logprobs(harness: Harness) -> None:
    decode = await harness.decode()
    cat, half = harness.ids(" cat")[0], harness.ids("é")[0]
    logprobs = [
        TokenLogprob(token_id=cat, logprob=-0.5, top=((cat, -0.5),)),
        TokenLogprob(token_id=half, logprob=-1.5, top=((cat, -0.2),)),
    ]
    decode.script = lambda admit: Script([(cat, half)], "length", logprobs=logprobs)
    choice = (await harness.chat(max_tokens=2, logprobs=True, top_logprobs=1)).json()["choices"][0]
    cat_entry = {"token": " cat", "bytes": list(b" cat")}
    assert choice["logprobs"] == {
        "content": [
            {**cat_entry, "logprob": -0.5, "top_logprobs": [{**cat_entry, "logprob": -0.5}]},
            {"token": "bytes:\\xc3", "bytes": [0xC3], "logprob": -1.5, "top_logprobs": [{**cat_entry, "logprob": -0.2}]},
        ]
    }
    assert (await decode.expect(Admit)).sampling.logprobs == 1
    await harness.chat(max_tokens=2, logprobs=True)
    assert (await decode.expect(Admit)).sampling.logprobs == 0


async def test_token_ids_on_request(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("ok")
    body = (await harness.chat(return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == [*harness.ids("ok"), harness.eos]
    assert body["prompt_token_ids"] == list((await decode.expect(Admit)).token_ids)


async def test_n_choices(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = lambda admit: Script([harness.ids(str(admit.sampling.seed))], "length")
    body = (await harness.chat(n=3, seed=1)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["1", "2", "3"]


async def test_a_checkpoint_without_a_template_doesnt_chat(start_router: StartRouter, model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    harness = await start_router(model=tmp_path)
    response = await harness.chat()
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
