"""Seeded random weights: what training starts from, and those of checkpoints that are never trained.

The latter make a model whose text goes on and whose MTP module guesses well. Each token has one favourite successor (a
random permutation, wired from embeddings to head). The blocks add enough of the context to overrule it often, so greedy
text doesn't fall into a cycle; the MTP module knows the favourite only, so a part of its drafts is accepted and a part is
not. Both matter to whoever watches speculation work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.nemotron_h_config import NemotronHConfig
from engine.models.parameters import model_parameters, mtp_parameters

Floats = NDArray[np.float64]

CONTEXT_GAIN = 1.15
"""How much a block adds to the residual stream, relative to the token itself. More: fewer drafts are accepted."""
MTP_GAIN = 0.2
HEAD_GAIN = 2.0
"""How sure the model is of itself."""


def initial_weights(config: NemotronHConfig, seed: int) -> dict[str, Tensor]:
    """Spread by 1/sqrt(fan-in): with less, attention stays uniform and copying is learned late. float32."""
    random = np.random.Generator(np.random.PCG64(seed))
    shapes = model_parameters(config) | mtp_parameters(config)
    return {name: torch.from_numpy(_random(name, shape, config, random, lambda _: 1.0)).float() for name, shape in shapes.items()}


def make_weights(config: NemotronHConfig, *, unlikely: Collection[int], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the checkpoint by plain name, MTP included. The head hardly ever chooses the ``unlikely`` tokens."""
    random = np.random.Generator(np.random.PCG64(seed))
    shapes = model_parameters(config) | mtp_parameters(config)
    values = {name: _random(name, shape, config, random, _gain) for name, shape in shapes.items()}
    values["lm_head.weight"] = _successor_head(values["embeddings.weight"], unlikely, random)
    if config.mtp_blocks:
        values["mtp.layers.0.eh_proj.weight"] = _token_first(config.hidden_size, random)
    return {name: torch.from_numpy(value).to(dtype) for name, value in values.items()}


def _random(
    name: str, shape: tuple[int, ...], config: NemotronHConfig, random: np.random.Generator, gain: Callable[[str], float]
) -> Floats:
    """One parameter by its role: the same spreads as in trained models of this family."""
    heads = config.mamba_num_heads
    if name.endswith(".A_log"):
        decay: Floats = np.log(np.linspace(1.0, 16.0, heads))
        return decay
    if name.endswith(".dt_bias"):
        dt = np.exp(random.uniform(np.log(0.001), np.log(0.1), heads))
        inverse_softplus: Floats = dt + np.log(-np.expm1(-dt))
        return inverse_softplus
    if name.endswith(".D"):
        return np.ones(shape)
    noise: Floats = random.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.1 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if name == "embeddings.weight":
        return noise
    noise *= gain(name) / np.sqrt(shape[-1])
    return noise


def _gain(name: str) -> float:
    if not name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
        return 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    return MTP_GAIN if name.startswith("mtp.") else CONTEXT_GAIN


def _successor_head(embeddings: Floats, unlikely: Collection[int], random: np.random.Generator) -> Floats:
    """Row of each token = embedding of the token that it succeeds; the unlikely ones get nearly nothing."""
    vocab, d = embeddings.shape
    order = random.permutation([token for token in range(vocab) if token not in unlikely])
    head: Floats = 0.1 * random.standard_normal((vocab, d))
    head[np.roll(order, -1)] = embeddings[order]
    head *= HEAD_GAIN / np.sqrt(d)
    return head


def _token_first(d: int, random: np.random.Generator) -> Floats:
    """eh_proj that passes the token's embedding on and adds some of the hidden state."""
    return np.concatenate([np.eye(d), MTP_GAIN * random.standard_normal((d, d)) / np.sqrt(d)], axis=1)
