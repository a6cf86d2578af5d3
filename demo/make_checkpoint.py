"""Make the shipped checkpoint: a small Nemotron-H with an MTP module, in the real on-disk format.

``python -m demo.make_checkpoint DIRECTORY``. The same bytes from the same seed and the same Python release.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, TURN_END, train_tokenizer, unprintable_tokens, write_tokenizer
from demo.weights import make_weights
from engine.models.nemotron_h_config import parse_config

SEED = 2
CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 128,
    "hybrid_override_pattern": "M-*-M*-",
    "num_hidden_layers": 7,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "intermediate_size": 512,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
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


def make_checkpoint(directory: Path, seed: int = SEED) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model.safetensors into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = parse_config(CONFIG)
    write_config(directory, CONFIG, EOS_TOKEN_IDS)
    tokenizer = train_tokenizer(config.vocab_size)
    write_tokenizer(tokenizer, directory, config.max_position_embeddings)
    write_weights(directory, make_weights(config, unlikely=unprintable_tokens(tokenizer), seed=seed, dtype=torch.bfloat16))


def write_config(directory: Path, config: dict[str, Any], eos_token_ids: list[int]) -> None:
    generation = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"], "eos_token_id": eos_token_ids}
    for name, fields in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_weights(directory: Path, weights: dict[str, Tensor]) -> None:
    """One safetensors file with the names of published checkpoints. ``weights`` have plain names."""
    tensors = {stored_name(name): value.contiguous() for name, value in weights.items()}
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private


def stored_name(name: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.")) else f"backbone.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    make_checkpoint(arguments.directory, arguments.seed)


if __name__ == "__main__":
    main()
