"""``baton up``: a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cluster import ClusterError, LocalCluster, Spec, free_port
from baton.console import baton_command, cores, err, errors_as_exit, fail
from baton.models import default_speculation, resolve_model
from protocol.config import DecodeSettings, PrefillSettings, RouterSettings, Settings, UpSettings, WorkerSettings, load_settings

COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "baton": "yellow"}

Model = Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the small model shipped with Baton.", show_default=False)]
Prefill = Annotated[
    int | None, typer.Option(help="Prefill workers; 0: decode workers prefill by themselves. Default 1.", show_default=False)
]
Decode = Annotated[int | None, typer.Option(help="Decode workers. Default 1.", show_default=False)]
Speculation = Annotated[int | None, typer.Option(help="K, draft tokens per step, 0..7. Default 3 with MTP, else 0.", show_default=False)]
Host = Annotated[str | None, typer.Option(help="Address of the HTTP API. Default 127.0.0.1.", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port of the HTTP API. Default 8000.", show_default=False)]
Threads = Annotated[int | None, typer.Option(help="Threads per worker. Default: cores / workers.", show_default=False)]
PrefixCache = Annotated[
    bool | None,
    typer.Option("--prefix-cache/--no-prefix-cache", help="Keep prefixes for later requests. Default yes.", show_default=False),
]
AuditSample = Annotated[
    float | None, typer.Option(help="Share of the prefix cache's hits to compute again and compare, 0..1. Default 0.", show_default=False)
]
SnapshotDir = Annotated[
    Path | None, typer.Option(help="Directory for what the prefix cache has no room for. Default: none.", show_default=False)
]
ServedName = Annotated[str | None, typer.Option(help="Model name for clients. Default: the directory's name.", show_default=False)]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error, for all processes. Default info.", show_default=False)]
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
    prefix_cache: PrefixCache = None,
    audit_sample: AuditSample = None,
    snapshot_dir: SnapshotDir = None,
    log_level: LogLevel = None,
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
        "prefix_cache": prefix_cache,
        "audit_sample": audit_sample,
        "snapshot_dir": snapshot_dir,
        "log_level": log_level,
    }
    with errors_as_exit():
        plan = plan_cluster(load_settings(UpSettings, "baton", flags, config, os.environ), config, os.environ)
    try:
        asyncio.run(_serve(plan))
    except* ClusterError as group:
        error = group.exceptions[0]
        fail(str(error), error.code if isinstance(error, ClusterError) and error.code > 0 else 1)


@dataclass(frozen=True, slots=True)
class Plan:
    specs: tuple[Spec, ...]
    """Router first."""
    url: str


def plan_cluster(settings: UpSettings, config: Path | None, environ: Mapping[str, str]) -> Plan:
    """The children of a cluster and where it will answer. Raises ConfigError and ValueError before anything is started.

    A child reads file and environment as well, so it gets as flags only what was said to ``up``, or to nobody.
    """
    said = settings.model_fields_set
    model = resolve_model(settings.model)
    shared: dict[str, object] = {"model": model, "control": settings.control or f"tcp://127.0.0.1:{free_port()}"}
    shared |= {"log_level": settings.log_level} if "log_level" in said else {}
    http = {key: getattr(settings, key) for key in ("host", "port", "served_model_name") if key in said}
    enough = {"min_prefill": settings.prefill, "min_decode": settings.decode}  # /ready waits for all of them
    router = load_settings(RouterSettings, "router", shared | enough | http, config, environ)
    if router.port == 0:
        http["port"] = free_port()
    host, port = router.host, router.port or http["port"]
    require_free_port(host, port)

    threads = settings.threads or max(1, cores() // (settings.prefill + settings.decode))
    cache = {key: getattr(settings, key) for key in ("prefix_cache", "audit_sample", "snapshot_dir") if key in said}
    prefill = load_settings(PrefillSettings, "prefill", shared, config, environ)
    decode = load_settings(DecodeSettings, "decode", shared, config, environ)
    decode_flags = shared | _unless_said("threads", threads, settings, decode)
    decode_flags |= cache | _unless_said("speculation", default_speculation(model), settings, decode)
    prefill_flags = shared | cache | _unless_said("threads", threads, settings, prefill)
    if settings.prefill:
        _require_cache(load_settings(PrefillSettings, "prefill", prefill_flags, config, environ))
    _require_cache(load_settings(DecodeSettings, "decode", decode_flags, config, environ))
    specs = (
        _spec("router", "router", shared | enough | http, config),
        *(_worker("prefill", i, prefill_flags, config) for i in range(settings.prefill)),
        *(_worker("decode", i, decode_flags, config) for i in range(settings.decode)),
    )
    return Plan(specs, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def _unless_said(key: str, default: object, up: UpSettings, child: Settings) -> dict[str, object]:
    """What ``up`` was told wins; the default only where neither ``up`` nor the child was told anything."""
    if key in up.model_fields_set:
        return {key: getattr(up, key)}
    return {} if key in child.model_fields_set else {key: default}


def _require_cache(worker: WorkerSettings) -> None:
    """Raises ValueError as the worker's engine would, but before anything is started; that needs torch, which isn't loaded here."""
    if not worker.prefix_cache and (worker.snapshot_dir is not None or worker.audit_sample > 0):
        raise ValueError("snapshot_dir and audit_sample need prefix_cache")


def require_free_port(host: str, port: int) -> None:
    """ValueError when something listens there already: said before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port={port} on host={host} can't be used: {error.strerror}; choose another with --port") from None


def _spec(name: str, module: str, flags: Mapping[str, object], config: Path | None) -> Spec:
    given = {**flags, **({"config": config} if config else {})}
    args = [text for key, value in given.items() for text in _flag(key.replace("_", "-"), value)]
    return Spec(name=name, module=module, args=tuple(args))


def _flag(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)


def _worker(role: str, index: int, flags: Mapping[str, object], config: Path | None) -> Spec:
    return _spec(f"{role}-{index}", f"{role}_worker", {**flags, "worker_id": f"{role}-{index}"}, config)


def log_line(name: str, line: str) -> None:
    """One line of the common log on stderr."""
    err.print(f"{name:>10} │ ", style=COLOURS.get(name.split("-")[0], "white"), end="")
    err.print(line, markup=False)


async def _serve(plan: Plan) -> None:
    """Until a signal. The first one stops everything in order, a second one kills."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    cluster = LocalCluster(plan.specs, plan.url, log_line)

    def on_signal() -> None:
        if task.cancelling():
            log_line("baton", "killing everything")
            cluster.kill()
        else:
            log_line("baton", "stopping; once more kills at once")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        async with cluster:
            await cluster.ready()
            log_line("baton", f"ready: {plan.url}/v1  (try: {baton_command()} chat --url {plan.url}; Ctrl-C stops everything)")
            await cluster.supervise()
    except asyncio.CancelledError:
        log_line("baton", "stopped; nothing is left running")
