"""Gumbel noise that belongs to a (seed, position), the same in every process.

argmax(z + G) with independent standard Gumbel noise G draws from softmax(z) (Gumbel 1954; Maddison et al. 2014, arXiv
1411.0030). Keyed noise makes the draw a function of the logits alone: the drafter and the verifier, another worker or
a replay all meet the same noise at the same position.

Source of the bits: Philox4x64-10 (Salmon et al. 2011), a counter-based generator, as numpy builds it. numpy promises that
the raw bit stream of a bit generator never changes. The position sits in the third counter word, so that streams of
neighbouring positions, each 2^128 blocks long, never overlap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BUFFER_EMPTY = 4


class PositionNoise:
    """Noise of one sequence. Not for use by two threads at once."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Philox(key=seed)
        self._state = self._generator.state

    def uniforms(self, position: int, vocab_size: int) -> Floats:
        """Uniform numbers [vocab_size] strictly inside (0, 1), one per token id, exact multiples of 2^-53."""
        self._state["state"]["counter"][:] = (0, 0, position, 0)
        self._state["buffer_pos"] = _BUFFER_EMPTY
        self._generator.state = self._state  # three microseconds; building a generator takes twenty
        bits: NDArray[np.uint64] = self._generator.random_raw(vocab_size)
        uniforms = (bits >> np.uint64(12)).astype(np.float64)
        uniforms += 0.5
        uniforms *= 2.0**-52
        return uniforms


def gumbel(uniforms: Floats) -> Floats:
    """Standard Gumbel noise -log(-log(u)); finite for every u inside (0, 1). Overwrites and returns its argument."""
    for _ in range(2):
        np.log(uniforms, out=uniforms)
        np.negative(uniforms, out=uniforms)
    return uniforms
