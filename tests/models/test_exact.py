"""In fp64 the reference ops give transformers' logits to the last bits: the formulas are the same ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.loader import load_model
from kernels.reference import ReferenceOps

TOLERANCE = 1e-12
"""For logits of order 4; rounding of fp64 sums in another order gives about 1e-14."""


def run_oracle(checkpoints: list[Path], tokens: list[int], tokens_file: Path) -> list[Tensor]:
    """Logits [len(tokens), vocab] of each checkpoint, from one other process."""
    torch.save(torch.tensor(tokens), tokens_file)
    program = [sys.executable, str(Path(__file__).with_name("exact_oracle.py")), str(tokens_file)]
    subprocess.run([*program, *(str(path) for path in checkpoints)], check=True, timeout=250, capture_output=True)
    return [torch.load(path / "exact_logits.pt") for path in checkpoints]


def test_chunks_and_windows_in_fp64(make_checkpoint: Callable[..., Any], one_request: Any, prompt: list[int], tmp_path: Path) -> None:
    """Dense, latent MoE with and without normalised weights, and no conv bias: every parameter kind is in one of them."""
    checkpoints = [make_checkpoint(variant).path for variant in ("dense", "moe", "latent-moe", "no-conv-bias")]
    for path, expected in zip(checkpoints, run_oracle(checkpoints, prompt, tmp_path / "tokens.pt"), strict=True):
        model, info = load_model(path, ReferenceOps(), torch.float64, None)
        assert info.dtype == "float64"
        request = one_request(model, torch.float64)
        hidden = [request.chunk(prompt[:11]), request.chunk(prompt[11:18])]
        hidden.append(request.window(prompt[18:22], 6))
        request.commit(4)
        hidden.append(request.window(prompt[22:26], 4))
        torch.testing.assert_close(model.logits(torch.cat(hidden)), expected, rtol=0, atol=TOLERANCE)
