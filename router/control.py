"""What operators may ask of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protocol.messages import CacheFlushed
from router.audit import report
from router.cluster import Cluster
from router.errors import ApiError
from router.json_text import JsonAnswer
from router.workers import Worker


@dataclass(frozen=True, slots=True)
class Control:
    cluster: Cluster

    async def flush_cache(self, request: Request) -> Response:
        """Every worker forgets its cached prefixes. What running requests and hand-offs use is kept until they end: ``complete`` says
        whether there was any. 504 when a worker didn't answer.
        """
        flushed = await self.cluster.flush_caches()
        if flushed.silent:
            names = ", ".join(worker.worker_id for worker in flushed.silent)
            raise ApiError(504, f"no answer from {names}; the other {len(flushed.answers)} workers have flushed", code="flush_incomplete")
        told = [_told(worker, answer) for worker, answer in flushed.answers]
        return JsonAnswer({"complete": not any(one["kept_blocks"] or one["kept_snapshots"] for one in told), "workers": told})

    async def audit(self, request: Request) -> Response:
        """What the workers' audits have found since the router started, and how much they looked at."""
        return JsonAnswer(report(self.cluster.audit, self.cluster.table))


def _told(worker: Worker, answer: CacheFlushed) -> dict[str, Any]:
    prints = worker.hello.fingerprint
    return {
        "worker_id": worker.worker_id,
        "role": worker.hello.role,
        "freed_blocks": answer.freed_blocks,
        "freed_snapshots": answer.freed_snapshots,
        "freed_bytes": answer.freed_blocks * prints.block_bytes + answer.freed_snapshots * prints.slot_bytes,
        "kept_blocks": answer.kept_blocks,
        "kept_snapshots": answer.kept_snapshots,
    }
