"""The one place where an implementation is chosen, once, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.contract import Ops
from kernels.cpu_ops.torch_ops import TorchOps
from kernels.reference import ReferenceOps

Choice = Literal["auto", "native", "torch", "reference"]


@dataclass(frozen=True, slots=True)
class Selected:
    """The ops of this process and why they are the ones."""

    ops: Ops
    name: str
    reason: str


def select(choice: Choice, threads: int | None = None) -> Selected:
    """Choose the ops. ``threads`` None leaves torch's own number; ``auto`` takes the fastest that is built.

    Raises ValueError for an unknown choice, for one that is not available here, and for threads < 1.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    if choice in ("auto", "torch"):
        ops = TorchOps()
        return Selected(ops, ops.name, "asked for" if choice == "torch" else "native kernels are not built")
    if choice == "reference":
        return Selected(ReferenceOps(), ReferenceOps.name, "asked for")
    raise ValueError(f"kernels '{choice}' are not available here")
