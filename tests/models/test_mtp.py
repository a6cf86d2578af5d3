"""The MTP module against a second, plain implementation of its formulas (transformers has none)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from engine.batch import attention_rows, kv_index
from engine.models.loader import load_model
from kernels.contract import AttentionRows, Ops
from kernels.reference import ReferenceOps

BLOCK_TOKENS = 4
EPS = 1e-5
VARIANTS = ["dense", "moe", "latent-moe", "mtp-moe-first"]


class PlainMtp:
    """Whole sequence at once, causal, no cache. Entry i of the result belongs to the pair (hidden_i, token_{i+1})."""

    def __init__(self, path: Path, config: Any) -> None:
        self.weights = {name.removeprefix("backbone."): value for name, value in load_file(path / "model.safetensors").items()}
        self.config = config

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        w, kinds = self.weights, self.config.mtp_layers_block_type
        e = self.rms(F.embedding(tokens, w["embeddings.weight"]), "mtp.layers.0.enorm.weight")
        h = self.rms(hidden, "mtp.layers.0.hnorm.weight")
        u = torch.cat([e, h], dim=-1) @ w["mtp.layers.0.eh_proj.weight"].T
        mixers = {"full_attention": self.attention, "mlp": self.mlp, "moe": self.moe}
        for index, kind in enumerate(kinds):
            u = u + mixers[kind](self.rms(u, f"mtp.layers.{index}.norm.weight"), f"mtp.layers.{index}.mixer.")
        return self.rms(u, f"mtp.layers.{len(kinds) - 1}.final_layernorm.weight")

    def rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], EPS)

    def mlp(self, u: Tensor, prefix: str) -> Tensor:
        return F.relu(u @ self.weights[prefix + "up_proj.weight"].T).square() @ self.weights[prefix + "down_proj.weight"].T

    def attention(self, u: Tensor, prefix: str) -> Tensor:
        q, k, v = (
            (u @ self.weights[f"{prefix}{name}_proj.weight"].T).view(len(u), -1, self.config.head_dim).transpose(0, 1) for name in "qkv"
        )
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return seen.transpose(0, 1).flatten(1) @ self.weights[prefix + "o_proj.weight"].T

    def moe(self, u: Tensor, prefix: str) -> Tensor:
        w, config = self.weights, self.config
        scores = torch.sigmoid(u @ w[prefix + "gate.weight"].T)
        chosen = (scores + w[prefix + "gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
        gains = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        if config.norm_topk_prob:
            gains = gains / gains.sum(-1, keepdim=True)
        latent = config.moe_latent_size is not None
        inner = u @ w[prefix + "fc1_latent_proj.weight"].T if latent else u
        routed = torch.zeros_like(inner)
        for expert in range(config.n_routed_experts):
            routed += config.routed_scaling_factor * gains[:, expert, None] * self.mlp(inner, f"{prefix}experts.{expert}.")
        routed = routed @ w[prefix + "fc2_latent_proj.weight"].T if latent else routed
        return routed + self.mlp(u, prefix + "shared_experts.")


def indices(request: Any, first: int, count: int) -> Tensor:
    return torch.from_numpy(kv_index(request.blocks, first, count, BLOCK_TOKENS))


def rows_at(request: Any, first: int, count: int) -> AttentionRows:
    """One row of pairs stored at [first, first+count); each sees [1, its own index]."""
    num_keys = torch.arange(first + 1, first + count + 1).numpy()
    return attention_rows([count], [request.blocks], [num_keys], first_key=1)


@pytest.fixture(params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint(request.param, num_nextn_predict_layers=1)


def test_forward_equals_the_formulas(checkpoint: Any, load: Callable[..., Any], one_request: Any, prompt: list[int]) -> None:
    """In pieces, as drafting does it; hidden states are any values, so that the module is tested alone."""
    model = load(checkpoint.path, mtp=True)
    request = one_request(model)
    tokens = torch.tensor(prompt)
    hidden = torch.randn(len(prompt), model.dims.hidden, generator=torch.Generator().manual_seed(9))
    expected = PlainMtp(checkpoint.path, checkpoint.oracle.config)(tokens[1:], hidden[:-1])
    found = [
        model.mtp_forward(tokens[a:b], hidden[a - 1 : b - 1], indices(request, a, b - a), rows_at(request, a, b - a), request.pools)
        for a, b in ((1, 10), (10, 11), (11, 17), (17, 26))
    ]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=5e-5)


def test_kv_alone_is_the_kv_of_forward(checkpoint: Any, load: Callable[..., Any], one_request: Any, prompt: list[int]) -> None:
    model = load(checkpoint.path, mtp=True)
    whole, only_kv = one_request(model), one_request(model)
    tokens, hidden = torch.tensor(prompt[1:]), torch.randn(len(prompt) - 1, model.dims.hidden)
    at = indices(whole, 1, len(tokens))
    model.mtp_forward(tokens, hidden, at, rows_at(whole, 1, len(tokens)), whole.pools)
    model.mtp_write_kv(tokens, hidden, at, only_kv.pools)
    layer = model.dims.num_attention_layers
    assert bool(torch.isfinite(only_kv.pools.kv(layer)[only_kv.blocks[1]]).all())
    assert torch.equal(torch.nan_to_num(whole.pools.blocks.tensor), torch.nan_to_num(only_kv.pools.blocks.tensor))


def test_kv_does_not_depend_on_the_chunks(checkpoint: Any, one_request: Any, prompt: list[int]) -> None:
    """Pairs in one call or in many give the same bits (reference ops), and other layers' KV is left alone."""
    model, _ = load_model(checkpoint.path, ReferenceOps(), torch.float32, True)
    one, many = one_request(model), one_request(model)
    tokens, hidden = torch.tensor(prompt[1:]), torch.randn(len(prompt) - 1, model.dims.hidden)
    model.mtp_write_kv(tokens, hidden, indices(one, 1, len(tokens)), one.pools)
    for a, b in ((1, 2), (2, 9), (9, len(prompt))):
        model.mtp_write_kv(tokens[a - 1 : b - 1], hidden[a - 1 : b - 1], indices(many, a, b - a), many.pools)
    assert torch.equal(torch.nan_to_num(one.pools.blocks.tensor), torch.nan_to_num(many.pools.blocks.tensor))
    assert all(bool(torch.isnan(one.pools.kv(layer)[1:]).all()) for layer in range(model.dims.num_attention_layers))


def test_without_mtp_there_is_no_layer_for_it(checkpoint: Any, ops: Ops) -> None:
    model, info = load_model(checkpoint.path, ops, torch.float32, False)
    assert (info.has_mtp, model.mtp, model.dims.num_mtp_attention_layers) == (False, None, 0)
    model, info = load_model(checkpoint.path, ops, torch.float32, None)
    assert (info.has_mtp, model.dims.num_mtp_attention_layers) == (True, 1)
