"""What a loaded checkpoint says about itself: enough to tell whether two processes serve the same model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_type: str
    config_digest: str
    """xxh3-128 (hex) of the parsed configuration: the same for every spelling that means the same model."""
    weights_digest: str
    """xxh3-128 (hex) of the weight files' bytes, in the order of their names."""
    vocab_size: int
    max_model_len: int
    """The checkpoint's max_position_embeddings."""
    eos_token_ids: tuple[int, ...]
    """Sorted. From generation_config.json, else from config.json; may be empty."""
    has_mtp: bool
    """The MTP module was loaded."""
    dtype: str
    """Of computation, KV and state: 'float32' or 'float64'."""
