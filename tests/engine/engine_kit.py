"""Tiny checkpoints in the layout of real ones, and ways to drive an engine core to its end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import kernels
from engine.config import EngineConfig, KernelChoice
from engine.core import EngineCore, LoadedModel
from engine.models.nemotron_h_config import parse_config
from engine.models.parameters import model_parameters, mtp_parameters
from engine.request import EngineEvent, EngineRequest, FailedEvent, FinishedEvent, Origin, SealedEvent, StartedEvent, TokensEvent
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams

VOCAB = 40
MODEL: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": VOCAB, "hidden_size": 16, "max_position_embeddings": 128, "eos_token_id": 1,
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8, "num_nextn_predict_layers": 1,
}  # fmt: skip


def write_checkpoint(path: Path, *, mtp: bool = True, seed: int = 0) -> Path:
    """Random weights. Embeddings dominate the residual stream and MTP passes them on, so that drafts are often right."""
    path.mkdir(parents=True, exist_ok=True)
    raw = MODEL | {"num_nextn_predict_layers": int(mtp)}
    config = parse_config(raw)
    generator = torch.Generator().manual_seed(seed)
    shapes = model_parameters(config) | mtp_parameters(config)
    weights = {name: _value(name, shape, generator) for name, shape in shapes.items()}
    save_file(
        {name if name.startswith("mtp.") else f"backbone.{name}".replace("backbone.lm_", "lm_"): w for name, w in weights.items()},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(raw))
    return path


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(torch.rand(shape, generator=generator) * 3 + 0.3)
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name.endswith("eh_proj.weight"):
        return torch.cat([torch.eye(shape[0]), 0.05 * noise[:, shape[0] :]], dim=1).contiguous()
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.1 * noise
    if "embeddings" in name or "lm_head" in name or len(shape) == 1 or "conv1d" in name:
        return noise
    return noise * ((0.15 if "mtp" in name else 0.35) / math.sqrt(shape[-1]))


def key(name: str | int, generation: int = 0) -> RequestKey:
    return RequestKey(RequestId(str(name)), generation)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens above the EOS id."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist())


def request(name: str | int, tokens: Sequence[int], *, origin: Origin = "local", **params: Any) -> EngineRequest:
    sampling = SamplingParams(**({"ignore_eos": True} | params))
    return EngineRequest(key=key(name), token_ids=tuple(tokens), origin=origin, sampling=sampling)


@dataclass
class Told:
    """All that an engine said of one request. Asserts what every listener may rely on."""

    tokens: list[int] = field(default_factory=list)
    endings: list[EngineEvent] = field(default_factory=list)

    def hear(self, event: EngineEvent) -> None:
        assert not self.endings, f"{event} after the end {self.endings}"
        if isinstance(event, TokensEvent):
            assert event.index == len(self.tokens), "a gap or a repetition"
            assert event.token_ids, "an event without tokens"
            self.tokens += event.token_ids
        elif isinstance(event, (FinishedEvent, FailedEvent, SealedEvent)):
            self.endings.append(event)


class Drive:
    """Steps a core, checks its integrity after every step, keeps what it said by request key."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.told: dict[RequestKey, Told] = {}
        self.events: list[EngineEvent] = []

    def step(self) -> list[EngineEvent]:
        """One batch, and the call that announces its first chunks when there are some."""
        events = self.core.step()
        if events and all(isinstance(event, StartedEvent) for event in events):
            events = [*events, *self.core.step()]
        for event in events:
            self.told.setdefault(event.key, Told()).hear(event)
        self.events += events
        self.core.check_integrity()
        return events

    def run(self, *, max_steps: int = 2000, between: Callable[[int], None] = lambda step: None) -> None:
        """Until nothing is left to do. ``between`` is called with the step's number before each step."""
        for number in range(max_steps):
            between(number)
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps; load: {self.core.load()}")

    def outputs(self, requests: Iterable[EngineRequest], **run: Any) -> list[list[int]]:
        """Submit all, run to the end, return each one's tokens; all must have finished and every page be back."""
        requests = list(requests)
        for each in requests:
            self.core.submit(each)
        self.run(**run)
        for each in requests:
            assert [type(event) for event in self.told[each.key].endings] == [FinishedEvent], self.told[each.key]
        assert_whole(self.core)
        return [self.told[each.key].tokens for each in requests]


def assert_whole(core: EngineCore) -> None:
    """Every page is back."""
    core.check_integrity()
    load = core.load()
    assert load.free_blocks == core.capacity.num_blocks - 1
    assert load.free_slots == core.capacity.num_slots - 1


def poison(core: EngineCore) -> None:
    """NaN in every page that is nobody's, the sinks included."""
    pools = core.pools
    pools.blocks.tensor[[0, *pools.blocks.free_ids()]] = float("nan")
    pools.slots.tensor[[0, *pools.slots.free_ids()]] = float("nan")


class MakeCore:
    """make(**config) builds a core on the shared model: the weights are loaded once per kernels and MTP choice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded: dict[tuple[str, bool | None], LoadedModel] = {}

    def __call__(self, **config: Any) -> EngineCore:
        merged: dict[str, Any] = {"model": self._path, "block_tokens": 4, "kernels": "torch", "kv_blocks": 200} | config
        settings = EngineConfig(**merged)
        cached = (settings.kernels, settings.mtp)
        core = EngineCore(settings, self._loaded.get(cached))
        self._loaded[cached] = core.loaded
        return core


def _available(choice: KernelChoice) -> bool:
    try:
        kernels.select(choice)
    except ValueError:
        return False
    return True


KERNELS = tuple(choice for choice in ("torch", "native") if _available(choice))
"""The fast paths that this machine has built."""
