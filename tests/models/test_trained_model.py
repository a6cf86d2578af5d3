"""The model with gradients computes what the engine computes: hidden states, after a common beginning too, and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from demo.model import TrainedModel, chunked_scan
from demo.objective import run_beginning
from engine.drafter import Drafter, Entries
from engine.models.nemotron_h_config import parse_config
from engine.models.parameters import model_parameters, mtp_parameters
from engine.models.weight_files import WeightFiles

DEPTH = 4


@pytest.fixture(params=["dense", "mamba-mlp-first"])
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any]) -> Any:
    overrides = {} if request.param == "dense" else {"layers_block_type": ["linear_attention", "mlp"], "n_groups": 1}
    return make_checkpoint("dense", num_nextn_predict_layers=1, **overrides)


@pytest.fixture
def trained(checkpoint: Any) -> TrainedModel:
    config = parse_config(json.loads((checkpoint.path / "config.json").read_text()))
    files = WeightFiles(checkpoint.path)
    return TrainedModel(config, {name: files.read(name, torch.float32) for name in model_parameters(config) | mtp_parameters(config)})


def test_hidden_states(checkpoint: Any, trained: TrainedModel, load: Callable[..., Any], one_request: Any, prompt: list[int]) -> None:
    expected = one_request(load(checkpoint.path, mtp=True)).chunk(prompt)
    torch.testing.assert_close(trained.forward(torch.tensor([prompt]))[0], expected, rtol=0, atol=2e-5)


def test_drafts(checkpoint: Any, trained: TrainedModel, load: Callable[..., Any], one_request: Any, prompt: list[int]) -> None:
    """With every draft right, as training assumes."""
    model = load(checkpoint.path, mtp=True)
    anchor = len(prompt) - DEPTH - 2
    request = one_request(model)
    hidden = request.chunk(prompt)
    found: list[Tensor] = []

    def choose(logits: Tensor, greedy: int, drafts: Sequence[int]) -> int:
        found.append(logits.clone())
        return prompt[anchor + 2 + len(drafts)]

    entries = Entries(
        blocks=request.blocks, first=1, token_ids=prompt[1 : anchor + 2], hidden=hidden[: anchor + 1], num_drafts=DEPTH, choose=choose
    )
    Drafter(model, request.pools).follow([entries])
    tokens = torch.tensor([prompt])
    outputs = trained.drafts(tokens, trained.forward(tokens), torch.tensor([[anchor]]), DEPTH)
    assert len(found) == DEPTH
    torch.testing.assert_close(trained.logits(torch.stack([output[0, 0] for output in outputs])), torch.stack(found), rtol=0, atol=5e-5)


def test_a_common_beginning_changes_nothing(trained: TrainedModel, prompt: list[int]) -> None:
    tokens = torch.tensor([prompt, prompt])
    whole = trained.forward(tokens)
    past = run_beginning(trained, prompt[:9])
    rest = trained.forward(tokens[:, 9:], past)
    torch.testing.assert_close(rest, whole[:, 9:], rtol=0, atol=2e-5)
    anchors = torch.tensor([[9, 14], [11, 10]])
    expected = trained.drafts(tokens, whole, anchors, DEPTH)
    found = trained.drafts(tokens[:, 9:], rest, anchors - 9, DEPTH, past)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=5e-5)


def test_the_scan_does_not_depend_on_its_chunks() -> None:
    generator = torch.Generator().manual_seed(3)
    x, b, c = (torch.randn(2, 21, *shape, generator=generator) for shape in ((4, 8), (2, 6), (2, 6)))
    dt, a = torch.rand(2, 21, 4, generator=generator), -torch.rand(4, generator=generator)
    outputs, states = zip(*(chunked_scan(x, dt, a, b, c, None, chunk) for chunk in (1, 5, 21, 64)), strict=True)
    for output, state in zip(outputs[1:], states[1:], strict=True):
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(state, states[0], rtol=0, atol=1e-5)


def test_the_beginning_is_part_of_what_is_trained(trained: TrainedModel, prompt: list[int]) -> None:
    embeddings = trained.parameters["embeddings.weight"].requires_grad_()
    past = run_beginning(trained, prompt[:9])
    (gradient,) = torch.autograd.grad(trained.forward(torch.tensor([prompt[9:]]), past).square().sum(), embeddings)
    only_before = set(prompt[:9]) - set(prompt[9:])
    assert only_before
    assert all(bool(gradient[token].any()) for token in only_before)
