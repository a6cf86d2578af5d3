"""The process: sockets, cluster, HTTP server, and how they start and end together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from protocol.config import RouterSettings
from protocol.errors import ConfigError
from router.app import build_app
from router.cluster import WATCH_S, Cluster
from router.control import Control
from router.front import Front
from router.http_protocol import bounded_http
from router.hub import Hub
from router.metrics import Metrics
from router.model_files import load_model_files
from router.status import Status
from router.workers import WorkerTable

FLUSH_S = 0.1
"""For the last cancels to leave before the control socket closes."""
GOODBYE_S = 3
"""For clients to read their error event."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that it's they who close."""

log = logging.getLogger("baton.router")


class Router:
    """Binds both ports at once; ``run`` serves until a signal or ``stop``. Raises ConfigError (model, control or HTTP address)."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.files = load_model_files(settings.model, settings.served_model_name)
        self._http = _bind(settings.host, settings.port)
        try:
            self._hub = Hub(settings.control)
        except ConfigError:
            self._http.close()
            raise
        metrics = Metrics()
        self.cluster = Cluster(
            table=WorkerTable(self.files.model_type, self.files.vocab_size),
            transport=self._hub,
            metrics=metrics,
            queue_limit=settings.queue_limit,
            request_timeout_s=settings.request_timeout_s,
            local_prefill_tokens=settings.local_prefill_tokens,
            local_tail_tokens=settings.local_tail_tokens,
        )
        front = Front(self.files, self.cluster)
        status = Status(settings, self.files, self.cluster, metrics, time.monotonic())
        self._server = _Server(self.cluster, build_app(front, status, Control(self.cluster)), settings)

    @property
    def url(self) -> str:
        host, port = self._http.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def started(self) -> bool:
        return self._server.started

    @property
    def control(self) -> str:
        return self._hub.address

    async def run(self) -> None:
        """Both sockets are closed afterwards."""
        try:
            async with self._control_plane():
                log.info("serving %s on %s, workers dial %s", self.files.name, self.url, self.control)
                await self._server.serve(sockets=[self._http])
        finally:
            self._http.close()

    def stop(self) -> None:
        """As Ctrl-C: running requests end with an error, their workers are told."""
        self._server.leave(at_once=True)

    @contextlib.asynccontextmanager
    async def _control_plane(self) -> AsyncIterator[None]:
        self._hub.start(self.cluster.on_message)
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            if self.cluster.stop():
                await asyncio.sleep(FLUSH_S)
            self._hub.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.cluster.watch()
            except Exception:  # the next one comes all the same
                log.exception("the watchdog failed")


class _Server(uvicorn.Server):
    """Ends running requests before it waits for their connections: at once after Ctrl-C, after a while when told to terminate."""

    def __init__(self, cluster: Cluster, app: ASGIApp, settings: RouterSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=bounded_http(settings.receive_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=settings.log_level == "debug",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GOODBYE_S,
            )
        )
        self._cluster = cluster
        self._drain_timeout_s = settings.drain_timeout_s
        self._at_once = False
        self._told = False
        """By a signal."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def leave(self, *, at_once: bool) -> None:
        self._cluster.refuse_new()
        self._at_once = self._at_once or at_once
        self.should_exit = True
        if self._at_once:  # before any worker that is stopped too can drop them
            self._cluster.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C, or the second signal of any kind, ends at once. The loop does it: it may be in the middle of something here."""
        at_once = sig == signal.SIGINT or self._told
        self._told = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name, at_once)

    def _on_signal(self, name: str, at_once: bool) -> None:
        log.info("%s: leaving%s", name, " at once" if at_once else "")
        self.leave(at_once=at_once)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = time.monotonic() + self._drain_timeout_s
        while self._cluster.num_requests and not self._at_once and time.monotonic() < patience:  # noqa: ASYNC110  (three things may end it)
            await asyncio.sleep(0.05)
        self._cluster.stop()
        await asyncio.sleep(FLUSH_S)
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> socket.socket:
    """Raises ConfigError that names what can't be had."""
    if not host:
        raise ConfigError("host is empty: give an address, 0.0.0.0 for all of this machine")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
        bound.setblocking(False)
    except (OSError, OverflowError) as error:
        bound.close()
        told = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"can't listen on host={host!r}, port={port}: {told}") from None
    return bound
