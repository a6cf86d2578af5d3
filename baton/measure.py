"""What ``baton bench`` measures of an engine: prefill, decode and verify-step times, each beside something real in the same run."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from baton.console import cores
from engine import Engine, SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.nemotron_h import model_dims
from engine.models.nemotron_h_config import NemotronHConfig, parse_config
from engine.models.parameters import model_parameters
from engine.pools import block_parts, slot_parts
from engine.rows import Row, RowKind
from engine.runner import Runner
from protocol.regions import PagePart

WINDOW = 6
"""Positions of the measured verify step: K = 5."""
PROMPT_TOKENS = 32
"""Of each request whose decoding is measured."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    lowest: float
    highest: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:,.1f}  ({self.lowest:,.1f} .. {self.highest:,.1f}, {self.runs} runs)"


def machine() -> dict[str, Any]:
    return {"processor": platform.processor() or platform.machine(), "cores": cores(), "load_1min": os.getloadavg()[0]}


def require_room(model: Path, batch: int, num_tokens: int, speculation: int) -> None:
    """ValueError unless ``batch`` requests of ``num_tokens`` can be computed at the same time: more would only wait for one another."""
    config = _config(model)
    dims = model_dims(config, with_mtp=bool(config.mtp_blocks))
    defaults = EngineConfig(model=model)
    block_bytes = _num_bytes(block_parts(dims, defaults.block_tokens, torch.float32))
    slot_bytes = _num_bytes(slot_parts(dims, torch.float32)) * (speculation + 2)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    by_kv = defaults.kv_bytes // max(1, block_bytes * -(-num_tokens // defaults.block_tokens))
    by_state = memory // 2 // max(1, slot_bytes)  # the other half is for all the rest
    if batch > min(by_kv, by_state):
        why = f"{defaults.kv_bytes >> 20} MiB of KV" if by_kv <= by_state else f"half of this machine's {memory >> 30} GiB"
        raise ValueError(f"batch={batch} is not possible: at most {min(by_kv, by_state)} requests of {num_tokens} tokens fit in {why}")


def _num_bytes(parts: Sequence[PagePart]) -> int:
    return sum(part.num_bytes for part in parts)


def prefill(model: Path, *, prompt_tokens: int, batch: int, runs: int, threads: int | None) -> dict[str, Any]:
    """Prompt tokens per second, and the share of this machine's matmul peak that the model's weights make of it."""
    require_room(model, batch, prompt_tokens, speculation=0)
    with Engine(model, threads=threads, max_running=batch, step_tokens=max(512, prompt_tokens), prefix_cache=False) as engine:
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        rates, peaks = [], []
        for run in range(-1, runs):
            prompts = _prompts(run, batch, prompt_tokens, engine.core.model_info.vocab_size)
            seconds = _timed(lambda prompts=prompts: engine.generate(prompts, one))  # type: ignore[misc]
            peak = _matmul_peak(engine.core)
            if run >= 0:
                rates.append(batch * prompt_tokens / seconds)
                peaks.append(peak)
        weights = _weights_per_token(model)
        share = statistics.median(rates) * 2 * weights / statistics.median(peaks) if weights else None
        return {
            "prefill tok/s": Spread.of(rates),
            "matmul peak GFLOP/s": Spread.of([peak / 1e9 for peak in peaks]),
            "share of peak": share and round(share, 3),
            "kernels": engine.core.kernels.name,
        }


def decode(model: Path, *, new_tokens: int, batch: int, runs: int, threads: int | None, speculation: int) -> dict[str, Any]:
    """Output tokens per second, without speculation and, when the checkpoint has MTP, with K = ``speculation``."""
    require_room(model, batch, PROMPT_TOKENS + new_tokens, speculation)
    result: dict[str, Any] = {}
    drafts = [0, speculation] if _config(model).mtp_blocks and speculation else [0]
    slots = {k: batch * (k + 2) + 1 + (1 + WINDOW) for k in drafts}  # and one window more for verify_step
    engines = [Engine(model, threads=threads, max_running=batch, speculation=k, state_slots=slots[k], prefix_cache=False) for k in drafts]
    rates: dict[int, list[float]] = {k: [] for k in drafts}
    for run in range(-1, runs):
        for k, engine in zip(drafts, engines, strict=True):
            prompts = _prompts(run, batch, PROMPT_TOKENS, engine.core.model_info.vocab_size)
            first = _timed(lambda e=engine, p=prompts: e.generate(p, SamplingParams(max_tokens=1, ignore_eos=True)))  # type: ignore[misc]
            whole = _timed(lambda e=engine, p=prompts: e.generate(p, SamplingParams(max_tokens=new_tokens, ignore_eos=True)))  # type: ignore[misc]
            if run >= 0:
                rates[k].append(batch * (new_tokens - 1) / (whole - first))
    for k in drafts:
        result[f"decode tok/s, K={k}"] = Spread.of(rates[k])
    if len(drafts) == 2:
        result[f"K={speculation} over K=0"] = round(statistics.median(rates[speculation]) / statistics.median(rates[0]), 2)
    result |= verify_step(engines[0].core, runs=max(runs, 20)) | {"kernels": engines[0].core.kernels.name}
    for engine in engines:
        engine.close()
    return result


def verify_step(core: EngineCore, *, runs: int, context: int = 256) -> dict[str, Any]:
    """Milliseconds of a one-row step and of a window of 6 rows, one request, over ``context`` tokens; logits of all rows included."""
    runner = Runner(core.loaded.model, core.pools)
    blocks = core.pools.blocks.take(core.pools.blocks.blocks_for(context + WINDOW))
    first, *scratch = core.pools.slots.take(1 + WINDOW)
    rng = random.Random(0)
    tokens = [rng.randrange(core.model_info.vocab_size) for _ in range(context + WINDOW)]
    start = Row(kind=RowKind.START, first=0, token_ids=tokens[:context], blocks=blocks, slot_in=first, slots_out=(first,), samples=False)

    def window(width: int) -> Row:
        real = tokens[context : context + width]
        return Row(
            kind=RowKind.VERIFY, first=context, token_ids=real, blocks=blocks, slot_in=first, slots_out=tuple(scratch[:width]), samples=True
        )

    with torch.inference_mode():
        runner.run([start])
        times: dict[int, list[float]] = {1: [], WINDOW: []}
        for run in range(-2, runs):
            for width in times:
                seconds = _timed(lambda width=width: runner.run([window(width)]))  # type: ignore[misc]
                if run >= 0:
                    times[width].append(1000 * seconds)
    core.pools.blocks.give(blocks)
    core.pools.slots.give([first, *scratch])
    return {
        "one-row step ms": Spread.of(times[1]),
        f"{WINDOW}-row step ms": Spread.of(times[WINDOW]),
        "ratio": round(statistics.median(times[WINDOW]) / statistics.median(times[1]), 2),
    }


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _prompts(seed: int, batch: int, length: int, vocab_size: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for _ in range(batch)]


def _config(model: Path) -> NemotronHConfig:
    return parse_config(json.loads((model / "config.json").read_text(encoding="utf-8")))


def _matmul_peak(core: EngineCore) -> float:
    """FLOP/s of the best square product in torch, now, with as many threads as the engine may use."""
    size = 2048
    before = torch.get_num_threads()
    torch.set_num_threads(core.config.threads or cores())
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(_timed(lambda: a @ b) for _ in range(3))
    torch.set_num_threads(before)
    return 2 * size**3 / best


def _weights_per_token(model: Path) -> int | None:
    """Weights that each prompt token is multiplied with; the head sees only the last one. None with experts: not all of them."""
    config = _config(model)
    if "moe" in config.layers_block_type:
        return None
    return sum(prod(shape) for name, shape in model_parameters(config).items() if name.startswith("layers.") and len(shape) == 2)
