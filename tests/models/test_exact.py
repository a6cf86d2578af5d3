"""In fp64 the reference ops give transformers' logits to the last bits: the formulas are the same ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.loader import load_model
from kernels.reference import ReferenceOps

TOLERANCE = 1e-12
"""For logits of order 4; rounding of fp64 sums in another order gives about 1e-14."""


def exact_logits(checkpoint: Path, tokens: list[int], folder: Path) -> Tensor:
    torch.save(torch.tensor(tokens), folder / "tokens.pt")
    program = [sys.executable, str(Path(__file__).with_name("exact_oracle.py")), str(checkpoint)]
    subprocess.run([*program, str(folder / "tokens.pt"), str(folder / "logits.pt")], check=True, timeout=100, capture_output=True)
    logits: Tensor = torch.load(folder / "logits.pt")
    return logits


@pytest.mark.parametrize("variant", ["dense", "latent-moe"])
def test_chunks_and_windows_in_fp64(
    variant: str, make_checkpoint: Callable[..., Any], one_request: Any, prompt: list[int], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(variant).path
    model, info = load_model(checkpoint, ReferenceOps(), torch.float64, None)
    assert info.dtype == "float64"
    request = one_request(model, torch.float64)
    hidden = [request.chunk(prompt[:11]), request.chunk(prompt[11:18])]
    hidden.append(request.window(prompt[18:22], 6))
    request.commit(4)
    hidden.append(request.window(prompt[22:26], 4))
    logits = model.logits(torch.cat(hidden))
    torch.testing.assert_close(logits, exact_logits(checkpoint, prompt, tmp_path), rtol=0, atol=TOLERANCE)
