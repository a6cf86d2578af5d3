"""What the router says about itself and its cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protocol.config import RouterSettings
from protocol.messages import PROTOCOL_VERSION
from router.audit import VIOLATIONS
from router.cluster import Cluster
from router.errors import not_served_here
from router.json_text import JsonAnswer
from router.metrics import Metrics
from router.model_files import ModelFiles
from router.workers import Worker

VERSION = version("baton-serve")


@dataclass(frozen=True, slots=True)
class Status:
    settings: RouterSettings
    files: ModelFiles
    cluster: Cluster
    metrics: Metrics
    started_at: float

    async def live(self, request: Request) -> Response:
        return JsonAnswer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        reasons = list(self._hindrances())
        if not reasons:
            return JsonAnswer({"ready": True, "mode": self._mode()})
        return JsonAnswer({"ready": False, "reasons": reasons}, status_code=503, headers={"retry-after": "1"})

    async def health(self, request: Request) -> Response:
        """Always 200 while the process answers; ``ready`` says whether it can serve."""
        fingerprint = self.cluster.fingerprint()
        return JsonAnswer(
            {
                "status": "ok",
                "ready": not list(self._hindrances()),
                "reasons": list(self._hindrances()),
                "mode": self._mode(),
                "model": self.files.name,
                "version": VERSION,
                "fingerprint": fingerprint.model_dump() if fingerprint else None,
                "requests": {"running": self.metrics.num_running(), "waiting": self.metrics.num_waiting()},
                "workers": [_told(worker) for worker in self.cluster.table],
            }
        )

    async def server_info(self, request: Request) -> Response:
        return JsonAnswer(
            {
                "version": VERSION,
                "protocol_version": PROTOCOL_VERSION,
                "epoch": self.cluster.epoch,
                "uptime_s": round(time.monotonic() - self.started_at, 3),
                "mode": self._mode(),
                "max_model_len": self._max_model_len(),
                "settings": self.settings.model_dump(mode="json"),
            }
        )

    async def version(self, request: Request) -> Response:
        return JsonAnswer({"version": VERSION})

    async def models(self, request: Request) -> Response:
        return JsonAnswer({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.files.name:
            raise not_served_here(name, self.files.name)
        return JsonAnswer(self._card())

    async def metrics_page(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.files.name,
            "object": "model",
            "created": int(time.time() - (time.monotonic() - self.started_at)),
            "owned_by": "baton",
            "root": str(self.settings.model),
            "parent": None,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int:
        return self.cluster.max_model_len(self.files.max_model_len)

    def _mode(self) -> str:
        """split: prompts go to prefill workers. local: decode workers compute them. down: nobody is there to decode."""
        if not self.cluster.table.decodes:
            return "down"
        return "split" if any(worker.paired for worker in self.cluster.table.decodes) else "local"

    def _hindrances(self) -> Iterator[str]:
        """Why requests can't be served as configured; nothing when they can."""
        if self.cluster.stopping:
            yield "the router is shutting down"
        table = self.cluster.table
        for role, workers, wanted in (
            ("decode", table.decodes, self.settings.min_decode),
            ("prefill", table.prefills, self.settings.min_prefill),
        ):
            useful = sum(not worker.draining for worker in workers)
            if useful < wanted:
                draining = f", {len(workers) - useful} draining" if len(workers) > useful else ""
                yield f"{useful} of {wanted} {role} workers{draining}"
        yield from self._pairing_hindrances()

    def _pairing_hindrances(self) -> Iterator[str]:
        table = self.cluster.table
        if not table.prefills or not table.decodes or any(worker.paired for worker in table.decodes):
            return
        refusals = [f"{worker.worker_id}: {why}" for worker in table.decodes for why in worker.unpaired.values()]
        told = f" ({'; '.join(refusals)})" if refusals else ""
        yield f"no decode worker is paired with a prefill worker yet{told}"


def _told(worker: Worker) -> dict[str, Any]:
    hello, violations = worker.hello, int(worker.counters.get(VIOLATIONS, 0))
    return {
        "worker_id": worker.worker_id,
        "epoch": worker.epoch,
        "role": hello.role,
        "draining": worker.draining,
        "requests": len(worker.requests),
        "capacity": hello.capacity.model_dump(),
        "load": worker.load.model_dump(),
        "paired": sorted(worker.paired),
        "unpaired": worker.unpaired,
        "degraded": "policies" in hello.info or violations > 0,
        "violations": violations,
        "info": hello.info,
    }
