"""Command-line options that the load commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from baton.reproduce import Fault
from loadgen.run import Arrival


class ArrivalKind(StrEnum):
    CLOSED = "closed"
    POISSON = "poisson"


_LOCAL = "Without --url: "
Url = Annotated[str | None, typer.Option(help="An OpenAI-compatible server. Default: start a cluster for this load.", show_default=False)]
ModelName = Annotated[str | None, typer.Option(help="With --url: which model. Default: its first.", show_default=False)]
ApiKeyEnv = Annotated[str, typer.Option(help="With --url: environment variable that has the API key.")]
Model = Annotated[Path | None, typer.Option(help=_LOCAL + "checkpoint directory. Default: the shipped model.", show_default=False)]
Prefill = Annotated[int | None, typer.Option(help=_LOCAL + "prefill workers; 0: one process does both. Default 1.", show_default=False)]
Decode = Annotated[int | None, typer.Option(help=_LOCAL + "decode workers. Default 1.", show_default=False)]
Speculation = Annotated[int | None, typer.Option(help=_LOCAL + "K, draft tokens per step, 0..7.", show_default=False)]
Threads = Annotated[int | None, typer.Option(help=_LOCAL + "threads per worker.", show_default=False)]
PrefixCache = Annotated[
    bool | None,
    typer.Option("--prefix-cache/--no-prefix-cache", help=_LOCAL + "keep prefixes for later requests.", show_default=False),
]
StepTokens = Annotated[int | None, typer.Option(min=1, help=_LOCAL + "token budget of one step. Default 8192.", show_default=False)]
Reproduce = Annotated[Fault | None, typer.Option(help=_LOCAL + "with another system's fault in it, to see it show.", show_default=False)]
ArrivalOption = Annotated[ArrivalKind, typer.Option(help="closed: always --concurrency at once; poisson: --rate begin per second.")]
Rate = Annotated[float | None, typer.Option(min=1e-6, help="With poisson: sessions per second.", show_default=False)]
Concurrency = Annotated[int, typer.Option(min=1, help="With closed: sessions at once.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same load.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Plot = Annotated[Path | None, typer.Option(help="Latency and acceptance over time, as png, svg or pdf.", show_default=False)]
SloTtft = Annotated[float | None, typer.Option(min=0.0, help="For goodput: ms to the first token, at most.", show_default=False)]
SloItl = Annotated[float | None, typer.Option(min=0.0, help="For goodput: ms per token after it, at most.", show_default=False)]
Tokens = Annotated[bool, typer.Option("--tokens", help="Keep token ids in the JSON, for bench compare.")]


def arrival_of(kind: ArrivalKind, rate: float | None, concurrency: int, seed: int) -> Arrival:
    """Raises ValueError."""
    if (kind is ArrivalKind.POISSON) != (rate is not None):
        raise ValueError("--rate and --arrival poisson go together")
    return Arrival(concurrency=concurrency, rate=rate, seed=seed)
