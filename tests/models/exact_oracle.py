"""Run as a program: logits of transformers with every fp32 turned into fp64, computed in one go without a cache.

Usage: exact_oracle.py TOKENS.pt CHECKPOINT... ; writes exact_logits.pt into each checkpoint directory. Its own process,
because the patch changes torch for good. Only so is transformers an exact oracle: unpatched, its norms and recurrences
stay fp32 in an fp64 model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import NemotronHForCausalLM


def main(tokens_file: str, *checkpoints: str) -> None:
    torch.set_num_threads(1)
    tokens = torch.load(tokens_file)
    models = [
        NemotronHForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for checkpoint in checkpoints
    ]
    # After loading, which must still know what F32 in a file means, and before anything is computed.
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.float32 = torch.float = torch.float64
    for checkpoint, model in zip(checkpoints, models, strict=True):
        with torch.no_grad():
            logits = model.to(torch.float64)(tokens[None], use_cache=False).logits[0]
        assert logits.dtype is torch.float64
        torch.save(logits, Path(checkpoint) / "exact_logits.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
