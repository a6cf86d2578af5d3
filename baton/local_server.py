"""The server that a load goes to: one that runs, or a cluster of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.own_cluster import own_cluster, plan_own_cluster
from baton.reproduce import Fault, with_fault
from baton.up import Plan
from protocol.config import ENVIRONMENT_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Of a cluster of its own. None: as ``baton up`` has it."""

    model: Path | None = None
    prefill: int | None = None
    decode: int | None = None
    speculation: int | None = None
    threads: int | None = None
    prefix_cache: bool | None = None
    step_tokens: int | None = None
    """Of its workers, and their longest chunk, as is the following."""
    max_running: int | None = None
    reproduce: Fault | None = None
    """Another system's fault in its workers."""

    def given(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    def plan(self) -> Plan:
        """Raises ConfigError and ValueError."""
        more = {"prefill": self.prefill, "decode": self.decode, "threads": self.threads, "prefix_cache": self.prefix_cache}
        plan = plan_own_cluster(self.model, self.speculation, **more)
        of_workers = {"step_tokens": self.step_tokens, "max_prefill_chunk": self.step_tokens, "max_running": self.max_running}
        plan = with_worker_settings(plan, {key: value for key, value in of_workers.items() if value is not None})
        return with_fault(plan, self.reproduce) if self.reproduce else plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str | None = None
    """None: a cluster of its own."""
    model_name: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    local: LocalOptions = field(default_factory=LocalOptions)

    def check(self) -> Plan | None:
        """The cluster to start, if one is needed. Raises ConfigError and ValueError."""
        if self.url is None:
            if self.model_name is not None:
                raise ValueError("--model-name goes with --url; a cluster of its own has one model, --model")
            return self.local.plan()
        if given := self.local.given():
            names = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            raise ValueError(f"{names}: these are for a cluster of its own, and --url names a server that runs")
        return None

    @property
    def running_url(self) -> str:
        """Of a server that runs, as requests need it."""
        assert self.url is not None
        return (self.url if "://" in self.url else f"http://{self.url}").rstrip("/").removesuffix("/v1")

    def api_key(self) -> str | None:
        """For servers that run: the local one wants none."""
        return os.environ.get(self.api_key_env) if self.url else None

    def described(self) -> dict[str, Any]:
        """For the report."""
        return {"url": self.url} if self.url else {"local": {key: str(value) for key, value in self.local.given().items()}}

    @asynccontextmanager
    async def serve(self, plan: Plan | None) -> AsyncIterator[str]:
        """Its URL, ready. Raises ClusterError."""
        if plan is None:
            yield self.running_url
            return
        async with own_cluster(plan) as cluster:
            yield cluster.url


def with_worker_settings(plan: Plan, settings: Mapping[str, object]) -> Plan:
    """The same cluster, its workers with these settings where no flag says otherwise."""
    more = {f"{ENVIRONMENT_PREFIX}{key.upper()}": str(value) for key, value in settings.items()}
    specs = (spec if spec.module == "router" else replace(spec, environment={**spec.environment, **more}) for spec in plan.specs)
    return replace(plan, specs=tuple(specs))
