"""The optimizer: Muon for the matrices inside the model, AdamW for embeddings, head, norms and other vectors.

Muon (Jordan et al. 2024) puts the nearest orthogonal matrix in place of a momentum. On these small models copying from
context appears after half as many tokens as with AdamW alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

MATRIX_RATE, OTHER_RATE = 0.02, 2e-3
MOMENTUM, WEIGHT_DECAY = 0.95, 0.05
LARGEST_NORM = 1.0
"""Of all gradients together."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer:
    def __init__(self, parameters: Mapping[str, Tensor], pool: Executor) -> None:
        self._all, self._pool = list(parameters.values()), pool
        self._matrices = [place for place, name in enumerate(parameters) if _is_inner_matrix(name, parameters[name])]
        self._others = [place for place in range(len(self._all)) if place not in set(self._matrices)]
        self._momenta = [torch.zeros_like(self._all[place]) for place in self._matrices]
        self._adam = torch.optim.AdamW([self._all[place] for place in self._others], betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """``rate``: 1 is the full learning rate. Gradients are clipped in place."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        torch._foreach_mul_(list(gradients), float((LARGEST_NORM / (norm + 1e-6)).clamp(max=1)))
        for place in self._others:
            self._all[place].grad = gradients[place]
        self._adam.param_groups[0]["lr"] = OTHER_RATE * rate
        self._adam.step()
        list(self._pool.map(lambda place, momentum: self._turn(place, momentum, gradients[place], rate), self._matrices, self._momenta))

    def _turn(self, place: int, momentum: Tensor, gradient: Tensor, rate: float) -> None:
        with torch.no_grad():
            matrix = self._all[place]
            momentum.lerp_(gradient, 1 - MOMENTUM)
            matrix.mul_(1 - MATRIX_RATE * rate * WEIGHT_DECAY)
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.add_(orthogonal(gradient.lerp(momentum, MOMENTUM)), alpha=-MATRIX_RATE * rate * scale)

    def state(self) -> dict[str, Any]:
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._momenta = list(state["momenta"])
        self._adam.load_state_dict(state["adam"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Its singular values brought near 1, by five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    x: Tensor = matrix / (torch.linalg.matrix_norm(matrix) + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if tall else x
    return result


def _is_inner_matrix(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and name not in ("embeddings.weight", "lm_head.weight")
