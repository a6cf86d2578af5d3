"""What the shipped model is trained on, and that training goes on after a stop as if there had been none."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

import demo
from demo import train
from demo.evaluate import evaluate
from demo.muon import orthogonal
from demo.objective import Batch
from demo.recipe import Example, Recipe
from demo.train import Source, Stage, Training
from engine.models.loader import load_model
from kernels.select import select
from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from router.chat_template import load_chat_template


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def recipe(tokenizer: Tokenizer) -> Recipe:
    template = load_chat_template(demo.CHECKPOINT)
    assert template is not None
    return Recipe(tokenizer, template)


def wanted_text(tokenizer: Tokenizer, example: Example) -> list[str]:
    tokens = [token for token, wanted in zip(example.token_ids, example.wanted, strict=True) if wanted]
    text: str = tokenizer.decode(tokens, skip_special_tokens=False)
    return text.split("<|im_end|>")


def test_the_assistants_turns_are_wanted(recipe: Recipe, tokenizer: Tokenizer) -> None:
    instance = make_instance(5)
    *turns, after = wanted_text(tokenizer, recipe.episode(instance))
    said = [message for message in expert_messages(instance) if message["role"] == "assistant"]
    assert after == ""
    assert len(turns) == len(said)
    assert all(f'"{message["tool_calls"][0]["function"]["name"]}"' in turn for message, turn in zip(said[:-1], turns, strict=False))
    assert turns[-1] == said[-1]["content"]


def test_drills_fix_every_function_of_a_file(recipe: Recipe, tokenizer: Tokenizer) -> None:
    example = recipe.drill(Random(1))
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    *turns, after = wanted_text(tokenizer, example)
    names = [name for turn in turns for name in ("test", "read", "replace") if f'"name": "{name}"' in turn]
    num_functions = text.count("def ")
    assert num_functions > 1
    assert names == ["test", "read", "replace"] * num_functions
    assert after == ""


def test_copies_say_again_what_was_there(recipe: Recipe) -> None:
    example = recipe.copying(Random(1), 8)
    assert set(example.token_ids) - set(recipe.symbols[:8]) == {example.token_ids[0]}
    pairs = list(zip(example.token_ids, example.token_ids[1:], strict=False))
    for place, wanted in enumerate(example.wanted):
        assert not wanted or pairs[place - 1] in pairs[: place - 1]


def test_words_of_episodes_are_one_token_wherever_they_stand(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("price").ids
    assert len(whole) == 1
    for text in ("price", " price", "_price", '"price"', "\n    price", "(price,", "x price y"):
        assert tokenizer.encode(text).ids.count(whole[0]) == 1


def test_wanted_ahead_counts_to_the_end_of_the_stretch() -> None:
    wanted = torch.tensor([[False, True, True, False, True], [True, True, True, True, True]])
    assert Batch(torch.zeros(2, 5), wanted).wanted_ahead.tolist() == [[0, 2, 1, 0, 1], [5, 4, 3, 2, 1]]


def test_a_stop_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages = (
        Stage(name="one", steps=2, turns=(Source.COPIES,), rows=2, symbols=8),
        Stage(name="two", steps=2, turns=(Source.DRILLS, Source.TEXTS), rows=2, draft_weight=0.5, rates=(1.0, 0.5)),
    )
    monkeypatch.setattr(train, "STAGES", stages)
    monkeypatch.setattr("demo.recipe.TEXT_BYTES", 60_000)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo.CHECKPOINT / file, tmp_path / name / file)
    whole = Training(tmp_path / "whole", seed=3)
    assert len(list(whole.steps())) == 4
    stopped = Training(tmp_path / "stopped", seed=3)
    next(steps := stopped.steps())
    next(steps)
    next(steps)
    stopped.save()
    resumed = Training(tmp_path / "stopped", seed=3)
    assert dataclasses.replace(resumed.position, seconds=0) == dataclasses.replace(stopped.position, seconds=0)
    assert len(list(resumed.steps())) == 1
    assert all(torch.equal(value, resumed.parameters[name]) for name, value in whole.parameters.items())
    resumed.write_checkpoint(tmp_path / "made")
    model, _ = load_model(tmp_path / "made", select("torch").ops, torch.float32, True)
    assert torch.equal(model.embeddings, resumed.parameters["embeddings.weight"].detach().bfloat16().float())
    assert evaluate(resumed.model, resumed.recipe, 2, resumed.pool).accuracy == 0


def test_orthogonal_keeps_directions_and_evens_out_their_sizes() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(1)).double()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = left.T @ orthogonal(matrix) @ right.T
    assert (sizes - sizes.diag().diag()).abs().max() < 1e-9
    assert bool(((sizes.diag() > 0.6) & (sizes.diag() < 1.3)).all())
    torch.testing.assert_close(orthogonal(matrix.T), orthogonal(matrix).T)
