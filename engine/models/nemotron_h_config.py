"""``config.json`` of the Nemotron-H family, in every spelling that real checkpoints use.

Every field is either used, allowed one value only, or known to change nothing here. Anything else is refused by name:
a setting that is silently ignored is a wrong answer later. A missing field has the meaning that transformers gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol.errors import CheckpointError

BlockKind = Literal["mamba2", "attention", "mlp", "moe"]

_LETTERS: dict[str, BlockKind] = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS: dict[str, BlockKind] = {
    "linear_attention": "mamba2", "mamba": "mamba2", "mamba2": "mamba2",
    "full_attention": "attention", "attention": "attention",
    "mlp": "mlp", "moe": "moe",
}  # fmt: skip

# Other names for the same field. Both may be given when they agree.
_ALIASES = {
    "layer_types": "layers_block_type",
    "hybrid_override_pattern": "layers_block_type",
    "mtp_hybrid_override_pattern": "mtp_layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "num_local_experts": "n_routed_experts",
    "attention_head_dim": "head_dim",
    "norm_eps": "layer_norm_epsilon",
    "rms_norm_eps": "layer_norm_epsilon",
}
_PATTERN_FIELDS = ("layers_block_type", "mtp_layers_block_type")

# Fields that change nothing here: training, initialisation, other programs' switches, precision below ours, token ids
# that only tokenisers use, and rotary settings of a model that has no rotary embedding.
_WITHOUT_EFFECT = frozenset({
    "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache", "num_logits_to_keep", "tokenizer_class",
    "pad_token_id", "bos_token_id", "sep_token_id", "decoder_start_token_id",
    "initializer_range", "rescale_prenorm_residual", "residual_in_fp32", "attention_dropout", "hidden_dropout",
    "use_mamba_kernels", "moe_shared_expert_overlap", "output_router_logits", "mamba_ssm_cache_dtype",
    "expand", "mamba_expand", "time_step_min", "time_step_max", "time_step_floor", "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor",
    "rope_theta", "partial_rotary_factor", "rope_parameters", "max_window_layers",
    "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder",
    "id2label", "label2id", "problem_type", "attn_implementation",
})  # fmt: skip

Size = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class NemotronHConfig(BaseModel):
    """Field names as in ``config.json``; defaults as in transformers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model_type: Literal["nemotron_h"]
    vocab_size: Size = 131072
    hidden_size: Size = 4096
    max_position_embeddings: Size = 4096
    tie_word_embeddings: bool = False
    layer_norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    eos_token_id: Count | tuple[Count, ...] | None = 2
    use_bias: Literal[False] = False

    layers_block_type: tuple[BlockKind, ...] = ("mamba2", "moe", "attention", "mlp")
    num_hidden_layers: int | None = None

    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = 8
    head_dim: Size = 128
    attention_bias: Literal[False] = False
    sliding_window: None = None
    rope_scaling: None = None

    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    ssm_state_size: Size = 128
    n_groups: Size = 8
    conv_kernel: Annotated[int, Field(ge=2)] = 4
    use_conv_bias: bool = True
    chunk_size: Size = 128
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_proj_bias: Literal[False] = False

    intermediate_size: Size = 21504
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mlp_bias: Literal[False] = False

    n_routed_experts: Count | None = 8
    num_experts_per_tok: Count | None = 2
    moe_intermediate_size: Size | None = 7688
    moe_latent_size: Size | None = None
    n_shared_experts: int | None = 1
    moe_shared_expert_intermediate_size: Size | None = 7688
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: Literal[1] | None = 1
    topk_group: Literal[1] | None = 1

    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=1)] = 0
    mtp_layers_block_type: tuple[BlockKind, ...] = ("attention", "moe")

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def mamba_width(self) -> int:
        """I = H·P."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_pieces(self) -> tuple[int, int, int]:
        return (self.mamba_width, self.n_groups * self.ssm_state_size, self.n_groups * self.ssm_state_size)

    @property
    def mtp_blocks(self) -> tuple[BlockKind, ...]:
        """Sub-blocks of the MTP module; empty when the checkpoint declares none."""
        return self.mtp_layers_block_type if self.num_nextn_predict_layers else ()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @field_validator("eos_token_id", mode="before")
    @classmethod
    def _list_is_fine(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("time_step_limit", mode="before")
    @classmethod
    def _read_limits(cls, value: object) -> object:
        return tuple(_number(item) for item in value) if isinstance(value, list) else value

    @field_validator(*_PATTERN_FIELDS, mode="before")
    @classmethod
    def _read_pattern(cls, value: object) -> object:
        return block_kinds(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        blocks = self.layers_block_type
        lower, upper = self.time_step_limit
        _require(len(blocks) > 0, "layers_block_type", blocks, "at least one layer")
        _require(
            self.num_hidden_layers in (None, len(blocks)),
            "num_hidden_layers",
            self.num_hidden_layers,
            f"{len(blocks)}, as layers_block_type",
        )
        _require(
            self.num_attention_heads % self.kv_heads == 0,
            "num_attention_heads",
            self.num_attention_heads,
            f"multiples of num_key_value_heads={self.kv_heads}",
        )
        _require(
            self.mamba_num_heads % self.n_groups == 0, "mamba_num_heads", self.mamba_num_heads, f"multiples of n_groups={self.n_groups}"
        )
        _require(0 <= lower < upper, "time_step_limit", self.time_step_limit, "0 <= lower < upper")
        if "moe" in (*blocks, *self.mtp_blocks):
            self._moe_fits_together()
        if self.mtp_blocks:
            # One attention sub-block, so that KV for a chunk can be written without running attention; no recurrence,
            # so that MTP has no state to keep.
            fits = self.mtp_blocks.count("attention") == 1 and "mamba2" not in self.mtp_blocks
            _require(fits, "mtp_layers_block_type", self.mtp_blocks, "exactly one attention block, and mlp or moe blocks")
        return self

    def _moe_fits_together(self) -> None:
        experts, chosen = self.n_routed_experts or 0, self.num_experts_per_tok or 0
        _require(experts > 0, "n_routed_experts", experts, "at least 1")
        _require(1 <= chosen <= experts, "num_experts_per_tok", chosen, f"1..n_routed_experts={experts}")
        _require(self.moe_intermediate_size is not None, "moe_intermediate_size", None, "at least 1")
        _require(self.n_shared_experts == 1, "n_shared_experts", self.n_shared_experts, "1")
        _require(self.moe_shared_expert_intermediate_size is not None, "moe_shared_expert_intermediate_size", None, "at least 1")


def parse_config(raw: Mapping[str, Any]) -> NemotronHConfig:
    """Raises CheckpointError that names the field, its value and what is allowed."""
    try:
        return NemotronHConfig.model_validate(_fold_aliases(raw))
    except ValidationError as error:
        raise CheckpointError("config.json: " + "; ".join(_told(detail) for detail in error.errors())) from None


def block_kinds(pattern: object) -> tuple[BlockKind, ...]:
    """'M-*E', or a list of words, to block kinds. Raises ValueError that names what is not known."""
    if isinstance(pattern, str):
        words: tuple[object, ...] = tuple(pattern)
        known: Mapping[str, BlockKind] = _LETTERS
    elif isinstance(pattern, (list, tuple)):
        words, known = tuple(pattern), _WORDS
    else:
        raise ValueError("allowed: a pattern string or a list of layer types")
    unknown = sorted({repr(word) for word in words if not isinstance(word, str) or word not in known})
    if unknown:
        raise ValueError(f"unknown layer type {', '.join(unknown)}; allowed: {', '.join(known)}")
    return tuple(known[str(word)] for word in words)


def _fold_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One entry per field under its own name. Two spellings that disagree are refused."""
    fields: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in raw.items():
        name = _ALIASES.get(key, key)
        if name in _WITHOUT_EFFECT or name.startswith("_") or (value is None and name in _PATTERN_FIELDS):
            continue
        if name in fields and not _same(name, fields[name], value):
            raise CheckpointError(f"config.json: {spelled[name]}={fields[name]!r} and {key}={value!r} disagree")
        fields[name], spelled[name] = value, key
    return fields


def _same(name: str, one: object, other: object) -> bool:
    if name not in _PATTERN_FIELDS:
        return one == other
    try:
        return block_kinds(one) == block_kinds(other)
    except ValueError as error:
        raise CheckpointError(f"config.json: {name}: {error}") from None


def _number(value: object) -> object:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    return value


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise CheckpointError(f"config.json: {field}={value!r} is not supported; allowed: {allowed}")


def _told(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{field}={detail['input']!r} is not a field known here, so its effect is not known"
    if detail["type"] == "missing":
        return f"{field} is missing"
    return f"{field}={detail['input']!r} is not supported; {detail['msg']}"
