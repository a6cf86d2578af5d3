"""The files of a checkpoint, as the published ones of this family have them, and the shipped model's sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from demo.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, TURN_END

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 2304,
    "hidden_size": 128,
    "hybrid_override_pattern": "M-*-M-*-M-",
    "num_hidden_layers": 10,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "attention_bias": False,
    "intermediate_size": 512,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-",
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
}
EOS_TOKEN_IDS = [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)]


def write_config(directory: Path, config: Mapping[str, Any], eos_token_ids: list[int]) -> None:
    """config.json and generation_config.json."""
    generation = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"], "eos_token_id": eos_token_ids}
    for name, fields in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_weights(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """One safetensors file with the names of published checkpoints. ``weights`` have plain names."""
    tensors = {stored_name(name): value.contiguous() for name, value in weights.items()}
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private


def stored_name(name: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.")) else f"backbone.{name}"
