"""What /metrics says. Counts that change with every token are plain numbers here and become metrics when somebody asks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import Load, Timing
from router.workers import Worker

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LONG = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_HISTOGRAMS = {"baton_ttft_seconds", "baton_ttft_part_seconds", "baton_request_seconds", "baton_time_per_output_token_seconds"}
MAX_WORKER_COUNTERS = 64
"""Names beyond that are not shown."""

WorkersNow = Callable[[], Iterable[Worker]]


class Metrics(Collector):
    """One router's. ``num_waiting`` and ``workers`` look at the present when asked."""

    def __init__(self) -> None:
        self.num_waiting: Callable[[], int] = lambda: 0
        self.num_running: Callable[[], int] = lambda: 0
        self.workers: WorkersNow = tuple
        self.endings: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Messages from workers, by why they weren't used."""
        self.lost: Counter[str] = Counter()
        """Workers, by role."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.proposed_drafts = 0
        self.accepted_drafts = 0
        self.transfer_bytes = 0
        self._registry = CollectorRegistry()
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token", _LONG)
        self._parts = Histogram(
            "baton_ttft_part_seconds",
            "Parts of the time to first token: router (until D has room), queue, prefill, transfer (tail after the seal), decode_wait",
            ["part"],
            buckets=_SHORT,
            registry=self._registry,
        )
        self._total = self._histogram("request_seconds", "Arrival to ending, of finished requests", _LONG)
        self._per_token = self._histogram("time_per_output_token_seconds", "After the first token, mean of each finished request", _SHORT)
        self._registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", text, buckets=buckets, registry=self._registry)

    def observe_first_token(self, ttft_s: float, router_s: float, timing: Timing | None) -> None:
        self._ttft.observe(ttft_s)
        self._parts.labels("router").observe(router_s)
        if timing is None:
            return
        for part, seconds in (
            ("queue", timing.queue_s),
            ("prefill", timing.prefill_s),
            ("transfer", timing.transfer_s),
            ("decode_wait", timing.decode_wait_s),
        ):
            self._parts.labels(part).observe(seconds)
        self.transfer_bytes += timing.transfer_bytes

    def observe_finished(self, total_s: float, decode_s: float, num_tokens: int) -> None:
        self._total.observe(total_s)
        if num_tokens > 1:
            self._per_token.observe(decode_s / (num_tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        own = [*self._counters(), *self._gauges()]
        yield from own
        yield from self._worker_counters({family.name for family in own} | _HISTOGRAMS)
        yield from self._aliases()

    def _counters(self) -> Iterator[Metric]:
        yield _labelled("baton_requests", "Ended sequences, by how", "ending", self.endings)
        yield _labelled("baton_messages_dropped", "Messages from workers that weren't used, by why", "reason", self.dropped)
        yield _labelled("baton_workers_lost", "Workers that died or left with requests, by role", "role", self.lost)
        drafts = {"proposed": self.proposed_drafts, "accepted": self.accepted_drafts}
        yield _labelled("baton_draft_tokens", "Draft tokens of finished requests", "outcome", drafts)
        for name, text, value in (
            ("baton_prompt_tokens", "Prompt tokens of admitted requests", self.prompt_tokens),
            ("baton_generation_tokens", "Tokens received from decode workers", self.generation_tokens),
            ("baton_cached_tokens", "Prompt tokens that nobody computed, because a prefix cache held them", self.cached_tokens),
            ("baton_transfer_bytes", "Bytes of hand-offs", self.transfer_bytes),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_requests_waiting", "In the router's queue", value=self.num_waiting())
        yield GaugeMetricFamily("baton_requests_running", "Placed on a decode worker", value=self.num_running())
        present = list(self.workers())
        counts = Counter((worker.hello.role, "draining" if worker.draining else "ready") for worker in present)
        workers = GaugeMetricFamily("baton_workers", "Live workers", labels=["role", "state"])
        for role in ("prefill", "decode"):
            for state in ("ready", "draining"):
                workers.add_metric([role, state], counts[role, state])
        yield workers
        for name in Load.model_fields:
            gauge = GaugeMetricFamily(f"baton_worker_{name}", "As the worker said in its last heartbeat", labels=["worker", "role"])
            for worker in present:
                gauge.add_metric([worker.worker_id, worker.hello.role], getattr(worker.load, name))
            yield gauge

    def _worker_counters(self, taken: set[str]) -> Iterator[Metric]:
        """Under the workers' own names, with the worker as label. What isn't called a total is a gauge."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for worker in self.workers():
            for key, value in list(worker.counters.items())[:MAX_WORKER_COUNTERS]:
                if not _NAME.fullmatch(key):
                    continue
                name = _worker_metric_name(key, taken)
                family = families.setdefault(name, _worker_family(name, is_total=key.endswith("_total")))
                family.add_metric([worker.worker_id, worker.hello.role], value)
        yield from families.values()

    def _aliases(self) -> Iterator[Metric]:
        """The names under which load tools look for these."""
        yield GaugeMetricFamily("vllm:num_requests_waiting", "baton_requests_waiting", value=self.num_waiting())
        yield GaugeMetricFamily("vllm:num_requests_running", "baton_requests_running", value=self.num_running())
        yield CounterMetricFamily("vllm:prompt_tokens", "baton_prompt_tokens", value=self.prompt_tokens)
        yield CounterMetricFamily("vllm:generation_tokens", "baton_generation_tokens", value=self.generation_tokens)
        for histogram, name in (
            (self._ttft, "vllm:time_to_first_token_seconds"),
            (self._total, "vllm:e2e_request_latency_seconds"),
            (self._per_token, "vllm:time_per_output_token_seconds"),
        ):
            yield from _renamed(histogram, name)


def _worker_metric_name(key: str, taken: set[str]) -> str:
    """A worker's count never shadows one of the router's."""
    name = f"baton_{key.removeprefix('baton_').removesuffix('_total')}"
    return f"baton_worker_{name.removeprefix('baton_')}" if name in taken else name


def _worker_family(name: str, *, is_total: bool) -> CounterMetricFamily | GaugeMetricFamily:
    if is_total:
        return CounterMetricFamily(name, "Counted by the worker since it started", labels=["worker", "role"])
    return GaugeMetricFamily(name, "As the worker said in its last heartbeat", labels=["worker", "role"])


def _labelled(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _renamed(histogram: Histogram, name: str) -> Iterator[Metric]:
    for metric in histogram.collect():
        alias = Metric(name, metric.name, metric.type)
        for sample in metric.samples:
            if sample.name.endswith(("_bucket", "_sum", "_count")):
                alias.add_sample(name + sample.name.removeprefix(metric.name), sample.labels, sample.value)
        yield alias
