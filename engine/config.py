"""Settings of one engine. Frozen; 'auto' values are resolved once, when the engine is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TailPadding = Literal["auto", "always", "never"]
ChunkPolicy = Literal["soft", "strict"]
KernelChoice = Literal["auto", "native", "torch", "reference"]
MAX_SPECULATION = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``None`` means: derive from the model and the other settings. Raises ValueError that names the key."""

    model: Path
    speculation: int = 0
    """K, draft tokens per step, 0..7. Above 0 needs a checkpoint with MTP."""
    mtp: bool | None = None
    """Keep MTP KV. None: whenever the checkpoint has an MTP module, so that blocks are the same for every K."""
    block_tokens: int = 16
    kv_blocks: int | None = None
    """None: room for ``max_running`` requests of the model's length, bounded by ``kv_bytes``."""
    kv_bytes: int = 2 << 30
    """Bound for the derived ``kv_blocks`` only."""
    state_slots: int | None = None
    """The whole pool, sink and snapshots included. None: max_running · (K+2) + 1 sink + ``snapshot_slots``."""
    max_running: int = 16
    step_tokens: int = 512
    """Token budget of one step."""
    max_prefill_chunk: int = 256
    """Longest chunk of one prompt in one step."""
    prefill_token_budget: int | None = None
    """Most tokens of all chunks in a step in which others decode: bounds how long their next token takes. None: ``step_tokens``."""
    chunk_policy: ChunkPolicy = "soft"
    """Of chunks that can't end where a snapshot is wanted: strict defers them, soft runs them as far as they go."""
    backoff_tokens: int = 0
    """See ``engine.planner.ChunkRule``; for comparison only."""
    prefix_cache: bool = True
    snapshot_tokens: int = 256
    """The grid: states are kept at its multiples, at a prompt's and an answer's end and where requests part."""
    snapshot_slots: int | None = None
    """Most states that the cache keeps. None: 8 · max_running, bounded by ``snapshot_bytes``."""
    snapshot_bytes: int = 1 << 30
    """Bound for the derived ``snapshot_slots`` only."""
    snapshot_dir: Path | None = None
    """Where what the cache has no room for goes to, and comes back from after a restart. None: nowhere."""
    snapshot_dir_bytes: int = 8 << 30
    """Most bytes of files that this engine knows there. Others may share the directory: each bounds its own knowledge of it."""
    audit_sample: float = 0.0
    """Share of the cache's hits that are computed again in the background and compared, 0..1."""
    max_model_len: int | None = None
    """Bound for prompt + output; None: the checkpoint's max_position_embeddings."""
    tail_padding: TailPadding = "auto"
    kernels: KernelChoice = "auto"
    threads: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    """float64 needs kernels='reference'."""

    def __post_init__(self) -> None:
        checks = (
            ("speculation", 0 <= self.speculation <= MAX_SPECULATION, f"0..{MAX_SPECULATION}"),
            ("block_tokens", 1 <= self.block_tokens <= 1024, "1..1024"),
            ("kv_blocks", self.kv_blocks is None or self.kv_blocks >= 2, "at least 2, the sink block included"),
            ("kv_bytes", self.kv_bytes > 0, "at least 1"),
            ("state_slots", self.state_slots is None or self.state_slots >= 3, "at least 3, the sink slot included"),
            ("max_running", self.max_running >= 1, "at least 1"),
            ("step_tokens", self.step_tokens >= self.speculation + 1, "at least speculation + 1"),
            ("max_prefill_chunk", self.max_prefill_chunk >= 1, "at least 1"),
            ("prefill_token_budget", self.prefill_token_budget is None or self.prefill_token_budget >= 1, "at least 1"),
            ("chunk_policy", self.chunk_policy in ("soft", "strict"), "soft, strict"),
            ("backoff_tokens", self.backoff_tokens >= 0, "at least 0"),
            ("snapshot_tokens", self.snapshot_tokens >= 1, "at least 1"),
            ("snapshot_slots", self.snapshot_slots is None or self.snapshot_slots >= 0, "at least 0"),
            ("snapshot_bytes", self.snapshot_bytes >= 0, "at least 0"),
            ("snapshot_dir_bytes", self.snapshot_dir_bytes >= 0, "at least 0"),
            ("audit_sample", 0 <= self.audit_sample <= 1, "0..1"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("threads", self.threads is None or self.threads >= 1, "at least 1"),
            ("tail_padding", self.tail_padding in ("auto", "always", "never"), "auto, always, never"),
            ("kernels", self.kernels in ("auto", "native", "torch", "reference"), "auto, native, torch, reference"),
            ("dtype", self.dtype in ("float32", "float64"), "float32, float64"),
        )
        for key, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{key}={getattr(self, key)!r} is not possible; allowed: {allowed}")
        if self.dtype == "float64" and self.kernels != "reference":
            raise ValueError(f"dtype='float64' needs kernels='reference', not {self.kernels!r}")
        if not self.prefix_cache and (self.snapshot_dir is not None or self.audit_sample > 0):
            raise ValueError("snapshot_dir and audit_sample need prefix_cache")
        chunk = min(self.max_prefill_chunk, self.step_tokens, self.prefill_token_budget or self.step_tokens)
        if self.chunk_policy == "strict" and chunk < self.snapshot_tokens:
            raise ValueError(
                f"chunk_policy='strict' needs chunks that reach the grid: snapshot_tokens={self.snapshot_tokens} is more than {chunk}"
            )
