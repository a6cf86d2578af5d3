"""Tiny Nemotron-H checkpoints made by transformers, and one request's life run by hand over real pools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import build_step
from engine.models.loader import load_model
from engine.models.nemotron_h import NemotronH
from engine.models.nemotron_h_config import parse_config
from engine.models.parameters import mtp_parameters
from engine.pools import Pools
from engine.rows import Row, RowKind
from kernels.contract import Ops
from kernels.select import select

BLOCK_TOKENS = 4
MAX_TOKENS = 64
RUNNING, SCRATCH = 1, range(2, 10)

BASE = {
    "vocab_size": 128, "hidden_size": 32, "max_position_embeddings": MAX_TOKENS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"layers_block_type": [MAMBA, MLP, ATTENTION, MAMBA, MLP, ATTENTION], "mtp_layers_block_type": [ATTENTION, MLP]},
    "moe": {"layers_block_type": [MAMBA, MOE, ATTENTION, MAMBA, MLP]},
    "latent-moe": {"layers_block_type": [MOE, MAMBA, ATTENTION, MOE], "moe_latent_size": 16, "norm_topk_prob": False},
    "mtp-moe-first": {"layers_block_type": [MAMBA, ATTENTION], "mtp_layers_block_type": [MOE, ATTENTION, MLP]},
    "no-conv-bias": {"layers_block_type": [MAMBA, ATTENTION, MAMBA], "use_conv_bias": False, "num_key_value_heads": 4},
    "no-attention": {"layers_block_type": [MAMBA, MLP]},
}


def seeded_weights(shapes: dict[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Values by name: matrices N(0, 1/fan_in), norms around 1, and what drives dt and decay spread widely."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _value(name, tuple(shape), generator) for name, shape in sorted(shapes.items())}


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(torch.rand(shape, generator=generator) * 4 + 0.5)
    if name.endswith("dt_bias"):
        return noise - 3.0
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.1 * noise
    if len(shape) == 1 or "conv1d" in name:
        return 0.5 * noise
    return noise if "embeddings" in name else noise / shape[-1] ** 0.5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Checkpoint:
    path: Path
    oracle: Any
    """transformers' model with the same weights, eager, without the dt floor that it has in prefill only."""


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """make_checkpoint(variant, **config overrides): saved by transformers, with seeded weights; made once per session."""
    made: dict[str, Checkpoint] = {}

    def make(variant: str, **overrides: Any) -> Checkpoint:
        key = json.dumps([variant, overrides], sort_keys=True)
        if key not in made:
            made[key] = _save(tmp_path_factory.mktemp(variant), BASE | VARIANTS[variant] | overrides)
        return made[key]

    return make


def _save(path: Path, settings: dict[str, Any]) -> Checkpoint:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(**settings, time_step_min=1e-30, attn_implementation="eager", experts_implementation="eager")
    oracle = NemotronHForCausalLM(config).eval()
    values = seeded_weights({name: value.shape for name, value in oracle.state_dict().items()})
    if settings.get("tie_word_embeddings"):
        values["lm_head.weight"] = values["model.embeddings.weight"]
    oracle.load_state_dict(values)
    oracle.save_pretrained(path)
    if settings.get("num_nextn_predict_layers"):
        _add_mtp(path)
    return Checkpoint(path, oracle)


def _add_mtp(path: Path) -> None:
    """transformers has no MTP module, so its tensors are written beside the others."""
    from safetensors.torch import load_file, save_file

    shapes = mtp_parameters(parse_config(json.loads((path / "config.json").read_text())))
    tensors = load_file(path / "model.safetensors") | seeded_weights(dict(shapes), seed=1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@dataclass
class OneRequest:
    """A request that is run by hand: START, EXTEND and VERIFY rows over its own pages. All pages begin as NaN."""

    model: NemotronH
    dtype: torch.dtype = torch.float32
    length: int = 0
    blocks: list[int] = field(default_factory=lambda: list(range(MAX_TOKENS // BLOCK_TOKENS, 0, -1)))

    def __post_init__(self) -> None:
        self.pools = Pools(self.model.dims, len(self.blocks) + 1, SCRATCH.stop, BLOCK_TOKENS, self.dtype)
        self.pools.blocks.tensor.fill_(torch.nan)
        self.pools.slots.tensor.fill_(torch.nan)
        self.pools.blocks.tensor[0] = 0
        self.pools.slots.tensor[0] = 0

    def row(self, tokens: Sequence[int], *, width: int | None = None) -> Row:
        """The next tokens as a chunk, or as a window of ``width`` positions."""
        prefill = RowKind.EXTEND if self.length else RowKind.START
        return Row(
            kind=prefill if width is None else RowKind.VERIFY,
            first=self.length,
            token_ids=list(tokens),
            blocks=self.blocks,
            slot_in=RUNNING,
            slots_out=[RUNNING] if width is None else list(SCRATCH[:width]),
            samples=True,
        )

    def chunk(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states [len(tokens), d]; the request is longer by as much afterwards."""
        hidden = self.model.forward(build_step([self.row(tokens)], BLOCK_TOKENS), self.pools)
        self.length += len(tokens)
        return hidden

    def window(self, tokens: Sequence[int], width: int) -> Tensor:
        """Hidden states [len(tokens), d] of the real positions; nothing is committed."""
        hidden = self.model.forward(build_step([self.row(tokens, width=width)], BLOCK_TOKENS), self.pools)
        return hidden[: len(tokens)]

    def commit(self, count: int) -> None:
        """Make the state after ``count`` window positions the running one."""
        self.pools.slots.tensor[RUNNING] = self.pools.slots.tensor[SCRATCH[count - 1]]
        self.length += count


@pytest.fixture(params=["reference", "torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every implementation that this machine has."""
    try:
        return select(request.param, threads=1).ops
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def load(ops: Ops) -> Callable[..., NemotronH]:
    """load(path, dtype=float32, mtp=None) -> the model alone."""

    def load_one(path: Path, dtype: torch.dtype = torch.float32, mtp: bool | None = None) -> NemotronH:
        return load_model(path, ops, dtype, mtp)[0]

    return load_one


@pytest.fixture
def one_request() -> type[OneRequest]:
    return OneRequest


@pytest.fixture
def prompt() -> list[int]:
    """26 tokens: seven blocks of 4, more than three SSD chunks of 8."""
    tokens: list[int] = torch.randint(128, (26,), generator=torch.Generator().manual_seed(5)).tolist()
    return tokens
