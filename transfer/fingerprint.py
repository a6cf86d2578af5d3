"""What P and D must share before a hand-off may pass between them: made from a model and a layout, compared field by field."""

from __future__ import annotations

from typing import Protocol

from protocol.errors import FingerprintMismatch
from protocol.messages import Fingerprint
from transfer.layout import Layout


class ModelFacts(Protocol):
    """``engine.models.info.ModelInfo``, as far as it matters here."""

    @property
    def model_type(self) -> str: ...
    @property
    def config_digest(self) -> str: ...
    @property
    def weights_digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def has_mtp(self) -> bool: ...


def make_fingerprint(model: ModelFacts, layout: Layout, block_tokens: int) -> Fingerprint:
    return Fingerprint(
        model_type=model.model_type,
        config_digest=model.config_digest,
        weights_digest=model.weights_digest,
        dtype=model.dtype,
        state_dtype=model.dtype,
        block_tokens=block_tokens,
        block_bytes=layout.blocks.page_bytes,
        slot_bytes=layout.slots.page_bytes,
        layout_digest=layout.digest,
        mtp=model.has_mtp,
    )


def first_difference(ours: Fingerprint, theirs: Fingerprint) -> FingerprintMismatch | None:
    """Names the first field that differs, in the order of the fields: the most telling come first."""
    for name in Fingerprint.model_fields:
        if getattr(ours, name) != getattr(theirs, name):
            return FingerprintMismatch(name, getattr(ours, name), getattr(theirs, name))
    return None
