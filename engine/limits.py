"""The settings that bound a step and how many take part in it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig, TailPadding
from engine.planner import ChunkRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    speculation: int
    """K; every window has K+1 positions."""
    max_running: int
    step_tokens: int
    chunk: ChunkRule
    prefill_tokens: int | None
    """Of all chunks in a step in which others decode."""
    tail_padding: TailPadding

    @property
    def width(self) -> int:
        return self.speculation + 1


def limits_of(config: EngineConfig) -> Limits:
    return Limits(
        speculation=config.speculation,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        chunk=ChunkRule(
            policy=config.chunk_policy,
            grid=config.snapshot_tokens if config.prefix_cache else config.block_tokens,
            max_chunk=config.max_prefill_chunk,
            tail_tokens=config.speculation + 1,
            backoff_tokens=config.backoff_tokens,
        ),
        prefill_tokens=config.prefill_token_budget,
        tail_padding=config.tail_padding,
    )
