"""The checkpoint for speed figures: the real script, at a size that a test can afford."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from engine.models.loader import load_model
from kernels.select import select

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_random_checkpoint.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_random_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_loads(script: ModuleType, tmp_path: Path) -> None:
    small = script.CONFIG | {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 16, "mamba_head_dim": 4, "head_dim": 8}
    script.write_random_checkpoint(tmp_path, small, "bfloat16", seed=3)
    model, info = load_model(tmp_path, select("torch").ops, torch.float32, None)
    assert (info.vocab_size, info.has_mtp, model.dims.num_recurrent_layers, model.dims.num_attention_layers) == (1000, False, 9, 3)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "any text, naïve too <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 1000
    assert len(tokenizer.decode([999, 998])) > 0


def test_the_full_size_is_the_one_measured(script: ModuleType) -> None:
    from math import prod

    from engine.models.nemotron_h_config import parse_config
    from engine.models.parameters import model_parameters

    shapes = model_parameters(parse_config(script.CONFIG))
    assert sum(prod(shape) for shape in shapes.values()) // 1_000_000 == 127
