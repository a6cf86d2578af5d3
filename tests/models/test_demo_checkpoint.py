"""The shipped checkpoint: one real format for our loader, transformers and tokenizers, made from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import demo
import demo.tokenizer
from demo.make_checkpoint import CONFIG, EOS_TOKEN_IDS, SEED, stored_name, write_config
from demo.tokenizer import SPECIAL_TOKENS, train_tokenizer, unprintable_tokens, write_tokenizer
from demo.weights import make_weights
from engine.models.loader import load_model
from engine.models.nemotron_h_config import parse_config
from kernels.contract import Ops
from kernels.select import select

TEXT = 'def read_lines(path):\n    with open(path) as file:\n        return [line for line in file]  # naïve, 日本 "x" 1234\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat() -> Any:
    """transformers' reading of the same directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo.CHECKPOINT)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in demo.CHECKPOINT.iterdir()) < 5_000_000


def test_transformers_loads_every_tensor_and_computes_the_same(ops: Ops, one_request: Any, tokenizer: Tokenizer) -> None:
    from transformers import NemotronHForCausalLM

    oracle, report = NemotronHForCausalLM.from_pretrained(
        demo.CHECKPOINT, dtype=torch.float32, attn_implementation="eager", time_step_min=1e-30, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in report["unexpected_keys"])
    model, info = load_model(demo.CHECKPOINT, ops, torch.float32, None)
    assert (info.has_mtp, info.vocab_size, info.max_model_len, info.eos_token_ids) == (True, 1024, 4096, (2, 4))
    tokens = tokenizer.encode(TEXT).ids[:48]
    request = one_request(model)
    hidden = torch.cat([request.chunk(tokens[:20]), request.chunk(tokens[20:44]), request.window(tokens[44:], 4)])
    with torch.no_grad():
        expected = oracle.eval()(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(model.logits(hidden), expected, rtol=0, atol=2e-4)


def test_greedy_text_goes_on_without_a_cycle(one_request: Any, tokenizer: Tokenizer) -> None:
    model, _ = load_model(demo.CHECKPOINT, select("torch").ops, torch.float32, None)
    request = one_request(model, blocks=list(range(1, 40)))
    logits = model.logits(request.chunk(tokenizer.encode("import os\n").ids))
    text: list[int] = []
    for _ in range(100):
        text.append(int(logits[-1].argmax()))
        logits = model.logits(request.chunk(text[-1:]))
    assert len(set(text)) > 50
    assert not set(text) & set(EOS_TOKEN_IDS)


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 1.5
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


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


def test_weights_and_config_are_made_again_to_the_byte(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_config(tmp_path, CONFIG, EOS_TOKEN_IDS)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (demo.CHECKPOINT / name).read_bytes()
    made = make_weights(parse_config(CONFIG), unlikely=unprintable_tokens(tokenizer), seed=SEED, dtype=torch.bfloat16)
    stored = load_file(demo.CHECKPOINT / "model.safetensors")
    assert stored.keys() == {stored_name(name) for name in made}
    assert all(torch.equal(stored[stored_name(name)], value) for name, value in made.items())


def test_the_tokenizer_is_trained_alike_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped one depends on the Python release that it was trained on, so it isn't compared with."""
    monkeypatch.setattr(demo.tokenizer, "CORPUS_BYTES", 200_000)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tokenizer(train_tokenizer(512), tmp_path / name, 64)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
