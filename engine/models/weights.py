"""The tensors of a checkpoint under one name prefix, read when asked for, in the engine's dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.parameters import expert_names, fused_expert_name
from engine.models.weight_files import WeightFiles


@dataclass(frozen=True, slots=True)
class Weights:
    """Names are relative to ``prefix``. The loader has already checked that each is there in the right shape."""

    files: WeightFiles
    dtype: torch.dtype
    prefix: str = ""

    def under(self, name: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        return self.files.read(self.prefix + name, self.dtype)

    def stacked(self, *names: str) -> Tensor:
        """Several [out, in] weights as one, rows in the order of ``names``."""
        return torch.cat([self[name] for name in names])

    def experts(self, projection: str, count: int) -> Tensor:
        """'up_proj' or 'down_proj' of all experts, [E, out, in], from either layout on disk."""
        fused = fused_expert_name("", projection)
        if self.prefix + fused in self.files.tensors:
            return self[fused]
        return torch.stack([self[name] for name in expert_names("", projection, count)])
