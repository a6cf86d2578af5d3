"""The shipped checkpoint: one real format for our loader, transformers and tokenizers, and a model that does what it was trained for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import demo
import demo.tokenizer
from demo.files import CONFIG, EOS_TOKEN_IDS, write_config
from demo.tokenizer import SPECIAL_TOKENS, train_tokenizer, write_tokenizer
from engine import Completion, Engine
from engine.models.loader import load_model
from kernels.contract import Ops
from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from loadgen.swe.tools import SYSTEM_PROMPT, TOOLS
from protocol.sampling import SamplingParams
from router.chat_template import load_chat_template

TEXT = 'def read_lines(path):\n    with open(path) as file:\n        return [line for line in file]  # naïve, 日本 "x" 1234\n'
NUM_INSTANCES = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat() -> Any:
    """transformers' reading of the same directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo.CHECKPOINT)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in demo.CHECKPOINT.iterdir()) < 15_000_000


def test_transformers_loads_every_tensor_and_computes_the_same(ops: Ops, one_request: Any, tokenizer: Tokenizer) -> None:
    from transformers import NemotronHForCausalLM

    oracle, report = NemotronHForCausalLM.from_pretrained(
        demo.CHECKPOINT, dtype=torch.float32, attn_implementation="eager", time_step_min=1e-30, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in report["unexpected_keys"])
    model, info = load_model(demo.CHECKPOINT, ops, torch.float32, None)
    assert (info.has_mtp, info.vocab_size, info.max_model_len, info.eos_token_ids) == (True, CONFIG["vocab_size"], 4096, (2, 4))
    tokens = tokenizer.encode(TEXT).ids[:48]
    request = one_request(model)
    hidden = torch.cat([request.chunk(tokens[:20]), request.chunk(tokens[20:44]), request.window(tokens[44:], 4)])
    with torch.no_grad():
        expected = oracle.eval()(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(model.logits(hidden), expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def turns() -> list[tuple[Completion, str]]:
    """Every turn of some held-out episodes, given the expert's turns before it: what the model says, and what the expert said."""
    template = load_chat_template(demo.CHECKPOINT)
    assert template is not None
    prompts, expected = [], []
    for seed in range(NUM_INSTANCES):
        messages = expert_messages(make_instance(seed))
        for place in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
            prompts.append(template.render(messages[:place], tools=TOOLS))
            whole = template.render(messages[: place + 1], tools=TOOLS, extra={"add_generation_prompt": False})
            expected.append(whole[len(prompts[-1]) :].removesuffix("<|im_end|>\n"))
    with Engine(demo.CHECKPOINT, speculation=5, threads=1) as engine:
        said = engine.generate(prompts, SamplingParams(max_tokens=128, temperature=0))
    return list(zip(said, expected, strict=True))


def test_it_says_what_the_expert_says(turns: Sequence[tuple[Completion, str]]) -> None:
    """The accuracy over whole episodes, really run, is measured by ``baton bench swe``."""
    assert sum(said.text == expected for said, expected in turns) >= 0.9 * len(turns)
    assert all(said.finish_reason == "stop" for said, _ in turns)


def test_most_drafts_are_right(turns: Sequence[tuple[Completion, str]]) -> None:
    tokens = sum(len(said.token_ids) - 1 for said, _ in turns)
    accepted = sum(said.accepted_drafts for said, _ in turns)
    assert tokens / (tokens - accepted) >= 3.5


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 1.5
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


def test_what_every_episode_begins_with_is_short(chat: Any) -> None:
    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    assert len(chat.apply_chat_template(system, tools=TOOLS, return_dict=False)) <= 200


def test_chat_template_knows_every_role(chat: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Thanks"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    text = chat.apply_chat_template(messages, tools=[tool], add_generation_prompt=True, tokenize=False)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(tool) in system
    assert rest == (
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_plain_question_has_no_system_turn(chat: Any) -> None:
    tokens = chat.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    assert chat.decode(tokens) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.count(SPECIAL_TOKENS.index("<|im_start|>")) == 2


@pytest.mark.parametrize(
    ("message", "told"),
    [({"role": "robot", "content": ""}, "unknown role robot"), ({"role": "user", "content": [{"type": "image_url"}]}, "only text parts")],
)
def test_chat_template_refuses_what_it_cannot_show(chat: Any, message: dict[str, Any], told: str) -> None:
    from jinja2 import TemplateError

    with pytest.raises(TemplateError, match=told):
        chat.apply_chat_template([message], tokenize=False)


def test_the_config_is_the_one_in_the_code(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG, EOS_TOKEN_IDS)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (demo.CHECKPOINT / name).read_bytes()


def test_the_tokenizer_is_trained_alike_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped one depends on the Python release that it was trained on, so it isn't compared with."""
    monkeypatch.setattr(demo.tokenizer, "CORPUS_BYTES", 200_000)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tokenizer(train_tokenizer(900), tmp_path / name, 64)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
