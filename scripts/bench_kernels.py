"""Times of the ops at the sizes of a 127M-parameter Nemotron-H, our implementations beside ``torch.nn.functional.linear``.

    python scripts/bench_kernels.py linear scan update attention --threads 2 --json result.json

Implementations take turns within every repeat, so that a machine that slows down slows all. Weights of a linear layer are
several copies used in rotation, so that they come from memory as in a model. Figures are the median over the repeats, with
the lowest and highest; ``GB/s`` counts weights (linear) and ``GFLOP/s`` multiplications and additions.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from kernels import samples, select
from kernels.contract import Ops
from kernels.samples import MambaShape

SHAPE = MambaShape(heads=24, head_dim=64, groups=4, state=64)
HIDDEN, MIDDLE, VOCABULARY = 768, 2048, 32000
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 12, 4, 64, 16
IN_PROJECTION = SHAPE.inner + SHAPE.channels + SHAPE.heads
WEIGHTS = {"in_proj": (HIDDEN, IN_PROJECTION), "up": (HIDDEN, MIDDLE), "logits": (HIDDEN, VOCABULARY), "square": (4096, 4096)}
NO_LIMIT = (0.0, float("inf"))
OUT_OF_CACHE = 256 * 2**20
SHORTEST_RUN = 0.03
"""Seconds: a repeat calls the op as often as this takes, at least once."""
SETTLE = 0.005
"""Seconds between implementations: a team of threads that has just worked still spins."""

Call = Callable[[], object]
Build = Callable[[Ops], Call]


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    size: str
    build: Build
    plain: Callable[[], Call] | None = None
    """The same by plain torch, where there is such a thing."""
    weight_bytes: int = 0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    op: str
    size: str
    implementation: str
    milliseconds: float
    lowest: float
    highest: float
    gigabytes_per_second: float | None
    gigaflops_per_second: float | None


def linear_cases() -> Iterator[Case]:
    for name, (width, out) in WEIGHTS.items():
        size = 4 * width * out
        copies = [torch.randn(out, width) for _ in range(max(1, OUT_OF_CACHE // size))]
        for rows in (1, 2, 3, 4, 6, 8, 12, 16) if name != "logits" else (1, 6, 8):
            yield _linear_case(name, rows, copies)
        if name != "logits":
            yield _linear_case(name, 512, copies[:2])


def _linear_case(name: str, rows: int, weights: list[torch.Tensor]) -> Case:
    out, width = weights[0].shape
    x = torch.randn(rows, width)

    def build(ops: Ops) -> Call:
        packed = cycle([ops.pack_linear(weight) for weight in weights])
        return lambda: ops.linear(x, next(packed))

    def plain() -> Call:
        dense = cycle(weights)
        return lambda: F.linear(x, next(dense))

    return Case("linear", f"{name} {width}x{out}, {rows} rows", build, plain, 4 * width * out, 2.0 * rows * width * out)


def scan_cases() -> Iterator[Case]:
    for lengths in ([16], [256], [2048], [256] * 4):
        yield _scan_case(lengths)
        yield _conv_case(lengths)


def _scan_case(lengths: list[int]) -> Case:
    rows = samples.prefill_rows(lengths)
    inputs = samples.scan_inputs(sum(lengths), SHAPE)
    _, states = samples.state_pool(samples.slots_needed(rows), SHAPE)

    def build(ops: Ops) -> Call:
        return lambda: ops.mamba2_scan(*inputs.arguments, NO_LIMIT, states, rows, 128)

    return Case("mamba2_scan", f"{len(lengths)} rows of {lengths[0]}", build)


def _conv_case(lengths: list[int]) -> Case:
    rows = samples.prefill_rows(lengths)
    projected = torch.randn(sum(lengths), IN_PROJECTION)
    x = projected[:, SHAPE.inner : SHAPE.inner + SHAPE.channels]
    weight, bias = torch.randn(SHAPE.channels, SHAPE.taps), torch.randn(SHAPE.channels)
    windows, _ = samples.state_pool(samples.slots_needed(rows), SHAPE)

    def build(ops: Ops) -> Call:
        return lambda: ops.conv_prefill(x, weight, bias, windows, rows)

    return Case("conv_prefill", f"{len(lengths)} rows of {lengths[0]}", build)


def update_cases() -> Iterator[Case]:
    for num_rows in (1, 4, 8):
        for width in (1, 6):
            yield _update_case(num_rows, width)


def _update_case(num_rows: int, width: int) -> Case:
    rows = samples.window_rows(num_rows, width)
    inputs = samples.scan_inputs(num_rows * width, SHAPE)
    _, states = samples.state_pool(samples.slots_needed(rows), SHAPE)

    def build(ops: Ops) -> Call:
        return lambda: ops.mamba2_update(*inputs.arguments, NO_LIMIT, states, rows)

    return Case("mamba2_update", f"{num_rows} rows of {width}", build)


def attention_cases() -> Iterator[Case]:
    for keys in (300, 2048):
        for num_rows, width in ((1, 1), (1, 6), (8, 1), (8, 6)):
            yield _attention_case(num_rows, width, keys)
    for length in (256, 2048):
        yield _attention_case(1, length, length)


def _attention_case(num_rows: int, width: int, keys: int) -> Case:
    rows = samples.attention_rows([(keys - width, keys)] * num_rows, BLOCK_TOKENS)
    cache = samples.kv_cache(1 + num_rows * -(-keys // BLOCK_TOKENS), KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    query = torch.randn(num_rows * width, QUERY_HEADS, HEAD_DIM)
    flops = 4.0 * HEAD_DIM * QUERY_HEADS * float(rows.num_keys.sum())

    def build(ops: Ops) -> Call:
        return lambda: ops.paged_attention(query, cache, rows, HEAD_DIM**-0.5)

    return Case("paged_attention", f"{num_rows} rows of {width}, {keys} keys", build, flops=flops)


GROUPS = {"linear": linear_cases, "scan": scan_cases, "update": update_cases, "attention": attention_cases}


class Clock(StrEnum):
    """What a figure is: time that passed, or work of all threads (for a machine that others use too)."""

    WALL = "wall"
    CPU = "cpu"

    def read(self) -> float:
        return time.perf_counter() if self is Clock.WALL else time.process_time()


def measure(case: Case, implementations: list[str], threads: int, repeats: int, clock: Clock) -> list[Timing]:
    calls: dict[str, Call] = {}
    for name in implementations:
        if name == "plain":
            if case.plain is not None:
                calls[name] = case.plain()
        else:
            calls[name] = case.build(select(name, threads).ops)  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            torch.set_num_threads(1 if name == "native" else threads)
            time.sleep(SETTLE)
            taken = _time(call, clock)
            if repeat > 0:  # the first one warms up
                seconds[name].append(taken)
    return [_timing(case, name, values) for name, values in seconds.items()]


def _time(call: Call, clock: Clock) -> float:
    """Seconds per call."""
    calls, start = 0, clock.read()
    while (elapsed := clock.read() - start) < SHORTEST_RUN or calls == 0:
        call()
        calls += 1
    return elapsed / calls


def _timing(case: Case, implementation: str, seconds: list[float]) -> Timing:
    typical = median(seconds)
    return Timing(
        op=case.op,
        size=case.size,
        implementation=implementation,
        milliseconds=round(typical * 1e3, 4),
        lowest=round(min(seconds) * 1e3, 4),
        highest=round(max(seconds) * 1e3, 4),
        gigabytes_per_second=round(case.weight_bytes / typical / 1e9, 1) if case.weight_bytes else None,
        gigaflops_per_second=round(case.flops / typical / 1e9, 1) if case.flops else None,
    )


def machine(threads: int) -> dict[str, object]:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }


def show(console: Console, timings: list[Timing]) -> None:
    table = Table("op", "size", "implementation", "ms (lowest..highest)", "GB/s", "GFLOP/s")
    for t in timings:
        span = f"{t.milliseconds:.3f} ({t.lowest:.3f}..{t.highest:.3f})"
        table.add_row(t.op, t.size, t.implementation, span, str(t.gigabytes_per_second or ""), str(t.gigaflops_per_second or ""))
    console.print(table)


def main(
    groups: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(GROUPS)}; all when none is given")] = None,
    implementation: Annotated[list[str] | None, typer.Option(help="of plain, torch, native, reference")] = None,
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    clock: Annotated[Clock, typer.Option(help="wall, or cpu: work of all threads, for a busy machine")] = Clock.WALL,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    if unknown := set(groups or ()) - set(GROUPS):
        raise typer.BadParameter(f"no such group: {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    console = Console(width=140)
    console.print(before := machine(threads) | {"clock": clock.value})
    timings = [
        timing
        for group in groups or GROUPS
        for case in GROUPS[group]()
        for timing in measure(case, implementation or ["plain", "torch", "native"], threads, repeats, clock)
    ]
    show(console, timings)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": before, "timings": [asdict(t) for t in timings]}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
