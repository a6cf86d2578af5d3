"""The one place where an implementation is chosen, once, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.contract import Ops
from kernels.cpu_ops import native_ops
from kernels.cpu_ops.native_ops import NativeUnavailable
from kernels.cpu_ops.torch_ops import TorchOps
from kernels.reference import ReferenceOps

Choice = Literal["auto", "native", "torch", "reference"]

ASKED_FOR = "asked for"


@dataclass(frozen=True, slots=True)
class Selected:
    """The ops of this process and why they are the ones."""

    ops: Ops
    name: str
    reason: str


def select(choice: Choice, threads: int | None = None) -> Selected:
    """Choose the ops; ``auto`` takes the native ones where they can be used, else torch's, and says why.

    ``threads`` is for the chosen implementation: None means the cores of this process (native) or torch's own number.
    Sets torch's thread count for the process: ``threads`` for torch and reference, one for native, which brings its own
    threads and must not share the cores with a second team.

    Raises ValueError for an unknown choice, for native where it cannot be used, and for threads < 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    match choice:
        case "auto":
            try:
                return _native(threads, "built, and its self-check passes")
            except NativeUnavailable as error:
                return _on_torch(TorchOps(), threads, str(error))
        case "native":
            try:
                return _native(threads, ASKED_FOR)
            except NativeUnavailable as error:
                raise ValueError(f"kernels='native' cannot be used here: {error}") from error
        case "torch":
            return _on_torch(TorchOps(), threads, ASKED_FOR)
        case "reference":
            return _on_torch(ReferenceOps(), threads, ASKED_FOR)
    raise ValueError(f"kernels must be auto, native, torch or reference, not {choice!r}")


def _native(threads: int | None, reason: str) -> Selected:
    ops = native_ops.load(threads)
    torch.set_num_threads(1)
    return Selected(ops, ops.name, reason)


def _on_torch(ops: TorchOps | ReferenceOps, threads: int | None, reason: str) -> Selected:
    if threads is not None:
        torch.set_num_threads(threads)
    return Selected(ops, ops.name, reason)
