"""``baton up``: a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.cluster import ClusterError, LocalCluster, Spec, free_port
from baton.console import err, errors_as_exit, fail
from baton.models import resolve_model
from protocol.config import UpSettings, load_settings

COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "baton": "yellow"}

Model = Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the small model shipped with Baton.", show_default=False)]
Prefill = Annotated[
    int | None, typer.Option(help="Prefill workers; 0: decode workers prefill by themselves. Default 1.", show_default=False)
]
Decode = Annotated[int | None, typer.Option(help="Decode workers. Default 1.", show_default=False)]
Speculation = Annotated[int | None, typer.Option(help="K, draft tokens per step, 0..7. Default 0.", show_default=False)]
Host = Annotated[str | None, typer.Option(help="Address of the HTTP API. Default 127.0.0.1.", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port of the HTTP API. Default 8000.", show_default=False)]
Threads = Annotated[int | None, typer.Option(help="Threads per worker. Default: cores / workers.", show_default=False)]
ServedName = Annotated[str | None, typer.Option(help="Model name for clients. Default: the directory's name.", show_default=False)]
Config = Annotated[Path | None, typer.Option(help="TOML file; flags and BATON_* variables win over it.", show_default=False)]


def command(
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    speculation: Speculation = None,
    host: Host = None,
    port: Port = None,
    threads: Threads = None,
    served_model_name: ServedName = None,
    config: Config = None,
) -> None:
    flags: dict[str, object] = {
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "speculation": speculation,
        "host": host,
        "port": port,
        "threads": threads,
        "served_model_name": served_model_name,
    }
    with errors_as_exit():
        settings = load_settings(UpSettings, "baton", flags, config, os.environ)
        require_free_port(settings.host, settings.port)
        specs = cluster_specs(settings, config)
    try:
        asyncio.run(_serve(specs, settings))
    except* ClusterError as group:
        error = group.exceptions[0]
        fail(str(error), error.code if isinstance(error, ClusterError) and error.code > 0 else 1)


def require_free_port(host: str, port: int) -> None:
    """ConfigError-like ValueError when something listens there already: said before anything is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port={port} on host={host} can't be used: {error.strerror}; choose another with --port") from None


def cluster_specs(settings: UpSettings, config: Path | None = None) -> list[Spec]:
    """The children of a cluster, router first."""
    model = str(resolve_model(settings.model))
    control = settings.control or f"tcp://127.0.0.1:{free_port()}"
    workers = settings.prefill + settings.decode
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // workers)
    shared = ("--model", model, "--control", control, *(("--config", str(config)) if config else ()))
    worker = (*shared, "--threads", str(threads))
    name = settings.served_model_name
    enough = ("--min-prefill", str(settings.prefill), "--min-decode", str(settings.decode))  # /ready waits for all of them
    http = ("--host", settings.host, "--port", str(settings.port), *(("--served-model-name", name) if name else ()))
    decode = (*worker, "--speculation", str(settings.speculation))
    return [
        Spec(name="router", module="router", args=(*shared, *http, *enough)),
        *(_worker("prefill", i, worker) for i in range(settings.prefill)),
        *(_worker("decode", i, decode) for i in range(settings.decode)),
    ]


def _worker(role: str, index: int, args: Sequence[str]) -> Spec:
    return Spec(name=f"{role}-{index}", module=f"{role}_worker", args=(*args, "--worker-id", f"{role}-{index}"))


def log_line(name: str, line: str) -> None:
    """One line of the common log on stderr."""
    err.print(f"{name:>10} │ ", style=COLOURS.get(name.split("-")[0], "white"), end="")
    err.print(line, markup=False)


async def _serve(specs: list[Spec], settings: UpSettings) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    url = f"http://{settings.host}:{settings.port}"
    try:
        async with LocalCluster(specs, url, log_line) as cluster:
            await cluster.ready()
            log_line("baton", f"ready: {url}/v1  (try: baton chat --url {url}; Ctrl-C stops everything)")
            await cluster.supervise()
    except asyncio.CancelledError:
        log_line("baton", "stopped; nothing is left running")
