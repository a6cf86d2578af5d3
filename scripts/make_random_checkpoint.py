"""Write a Nemotron-H checkpoint of 127M random parameters, to measure speed with: Baton, vLLM and transformers all load it.

Usage: python scripts/make_random_checkpoint.py DIRECTORY [--dtype float32|bfloat16] [--seed N] [--positions N]. Takes 0.5 GB in float32.
"""

from __future__ import annotations

import argparse
from math import prod
from pathlib import Path
from typing import Any

import torch

from demo.files import CONFIG as DEMO_CONFIG
from demo.files import EOS_TOKEN_IDS, write_config, write_weights
from demo.tokenizer import SPECIAL_TOKENS, byte_tokenizer, write_tokenizer
from demo.weights import make_weights
from engine.models.nemotron_h_config import parse_config
from engine.models.parameters import model_parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG: dict[str, Any] = DEMO_CONFIG | {
    "vocab_size": 32000,
    "hidden_size": 768,
    "hybrid_override_pattern": "M-M-M-*-" * 3,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "mamba_num_heads": 24,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 4,
    "chunk_size": 128,
    "num_nextn_predict_layers": 0,
}
"""Dense, so that vLLM's CPU build takes it too: that build has no relu² experts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--positions", type=int, default=CONFIG["max_position_embeddings"], help="longest prompt and output together")
    arguments = parser.parse_args()
    config = CONFIG | {"max_position_embeddings": arguments.positions}
    write_random_checkpoint(arguments.directory, config, arguments.dtype, arguments.seed)
    count = sum(prod(shape) for shape in model_parameters(parse_config(CONFIG)).values())
    print(f"{arguments.directory}: {count / 1e6:.1f}M parameters, {arguments.dtype}")


def write_random_checkpoint(directory: Path, config: dict[str, Any], dtype: str, seed: int) -> None:
    """All files of a checkpoint, with a tokenizer that reads bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    parsed = parse_config(config)
    write_config(directory, config | {"dtype": dtype}, EOS_TOKEN_IDS)
    write_tokenizer(byte_tokenizer(parsed.vocab_size), directory, parsed.max_position_embeddings)
    unlikely = range(len(SPECIAL_TOKENS))
    write_weights(directory, make_weights(parsed, unlikely=unlikely, seed=seed, dtype=DTYPES[dtype]))


if __name__ == "__main__":
    main()
