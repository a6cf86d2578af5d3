"""The workers that the router knows, and what it has given them. Decides nothing about requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from protocol.config import check_address
from protocol.ids import Epoch, RequestId
from protocol.messages import PROTOCOL_VERSION, Fingerprint, Heartbeat, Hello, Load, Paired, PrefillPlace
from router.placement import DecodeView, PrefillView
from router.prefixes import HeldPrefixes

UNREACHABLE = float("-inf")
"""When a worker was heard whose connection is gone."""
SUPERSEDED_EPOCHS = 256
"""So many replaced process lives are remembered."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a worker isn't welcome."""

    field: str
    message: str


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process life."""

    hello: Hello
    heard_at: float = 0.0
    """By the router's clock, or UNREACHABLE."""
    load: Load = field(default_factory=Load)
    draining: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    requests: dict[RequestId, int] = field(default_factory=dict)
    """What is placed here, with its size: D prompt and output tokens, P prompt tokens to be computed, 0 once sealed."""
    refused_tokens: int | None = None
    """D: the smallest size that it had no room for since something ended there."""
    paired: set[Epoch] = field(default_factory=set)
    """D: the prefill workers that it can fetch from."""
    unpaired: dict[Epoch, str] = field(default_factory=dict)
    """D: those that it can't, and why."""
    held: HeldPrefixes = field(init=False)

    def __post_init__(self) -> None:
        capacity = self.hello.capacity
        room = (capacity.kv_blocks - 1) * self.hello.fingerprint.block_tokens
        self.held = HeldPrefixes(room if capacity.prefix_cache else 0)

    @property
    def epoch(self) -> Epoch:
        return self.hello.epoch

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def identity(self) -> bytes:
        return self.hello.epoch.encode()

    @property
    def reachable(self) -> bool:
        return self.heard_at > UNREACHABLE

    @property
    def max_tokens(self) -> int:
        """Longest prompt and output together that it can hold; the last output token needs no room, block 0 is the sink."""
        capacity, block_tokens = self.hello.capacity, self.hello.fingerprint.block_tokens
        return min(capacity.max_model_len, (capacity.kv_blocks - 1) * block_tokens + 1)

    @property
    def place(self) -> PrefillPlace:
        """Of a prefill worker."""
        assert self.hello.peer_address is not None
        return PrefillPlace(worker_id=self.worker_id, epoch=self.epoch, address=self.hello.peer_address)

    def prefill_view(self) -> PrefillView:
        return PrefillView(worker_id=self.worker_id, epoch=self.epoch, draining=self.draining, booked_tokens=sum(self.requests.values()))

    def decode_view(self) -> DecodeView:
        return DecodeView(
            worker_id=self.worker_id,
            epoch=self.epoch,
            draining=self.draining,
            reachable=self.reachable,
            num_running=len(self.requests),
            max_running=self.hello.capacity.max_running,
            max_tokens=self.max_tokens,
            booked_tokens=sum(self.requests.values()),
            refused_tokens=self.refused_tokens,
            paired=frozenset(self.paired),
        )


class Views:
    """Snapshots of all workers for one pass over waiting requests."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self._prefills = {worker.epoch: worker.prefill_view() for worker in table.prefills}
        self._decodes = {worker.epoch: worker.decode_view() for worker in table.decodes}

    @property
    def prefills(self) -> Collection[PrefillView]:
        return self._prefills.values()

    @property
    def decodes(self) -> Collection[DecodeView]:
        return self._decodes.values()

    def renew(self, decode: Epoch, prefill: Epoch | None) -> None:
        """Of these two, which have been given something."""
        worker = self._table.get(decode)
        if worker is not None:
            self._decodes[decode] = worker.decode_view()
        partner = self._table.get(prefill) if prefill else None
        if partner is not None:
            self._prefills[partner.epoch] = partner.prefill_view()


class WorkerTable:
    """All live workers. The first one's fingerprint is the cluster's as long as any worker lives."""

    def __init__(self, model_type: str, vocab_size: int) -> None:
        self._model_type = model_type
        self._vocab_size = vocab_size
        self._workers: dict[Epoch, Worker] = {}
        self._superseded: OrderedDict[Epoch, None] = OrderedDict()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, epoch: Epoch) -> Worker | None:
        return self._workers.get(epoch)

    @property
    def prefills(self) -> list[Worker]:
        return [worker for worker in self if worker.hello.role == "prefill"]

    @property
    def decodes(self) -> list[Worker]:
        return [worker for worker in self if worker.hello.role == "decode"]

    @property
    def fingerprint(self) -> Fingerprint | None:
        return next((worker.hello.fingerprint for worker in self), None)

    def check(self, hello: Hello) -> Rejection | None:
        """Whether this worker fits to the router's own files and to the rest of the cluster."""
        if hello.epoch in self._superseded:
            return Rejection("worker_id", f"another process has taken the name {hello.worker_id!r} since")
        return _check_peer_address(hello) or self._check_own(hello) or self._check_cluster(hello)

    def _check_own(self, hello: Hello) -> Rejection | None:
        theirs = hello.fingerprint
        if theirs.protocol_version != PROTOCOL_VERSION:
            return _differs("protocol_version", theirs.protocol_version, PROTOCOL_VERSION, "the router")
        if self._model_type and theirs.model_type != self._model_type:
            return _differs("model_type", theirs.model_type, self._model_type, "the router's model directory")
        vocab_size = hello.info.get("vocab_size", str(self._vocab_size))
        if vocab_size != str(self._vocab_size):
            return _differs("vocab_size", vocab_size, self._vocab_size, "the router's model directory")
        return None

    def _check_cluster(self, hello: Hello) -> Rejection | None:
        others = [worker.hello.fingerprint for worker in self if worker.worker_id != hello.worker_id]
        for name in Fingerprint.model_fields:
            theirs = getattr(hello.fingerprint, name)
            if others and theirs != getattr(others[0], name):
                return _differs(name, theirs, getattr(others[0], name), "the other workers")
        return None

    def predecessor(self, hello: Hello) -> Worker | None:
        """An earlier life of the same worker: it is gone, whether it said goodbye or not."""
        return next((worker for worker in self if worker.worker_id == hello.worker_id and worker.epoch != hello.epoch), None)

    def add(self, hello: Hello) -> Worker:
        worker = self._workers[hello.epoch] = Worker(hello=hello)
        return worker

    def remove(self, worker: Worker, *, superseded: bool = False) -> None:
        del self._workers[worker.epoch]
        for other in self:
            other.paired.discard(worker.epoch)
            other.unpaired.pop(worker.epoch, None)
        if superseded:
            self._superseded[worker.epoch] = None
            if len(self._superseded) > SUPERSEDED_EPOCHS:
                self._superseded.popitem(last=False)

    def silent_since(self, moment: float) -> list[Worker]:
        return [worker for worker in self if worker.heard_at < moment]

    def note_heartbeat(self, worker: Worker, message: Heartbeat) -> None:
        if not worker.requests or _is_easier(message.load, worker.load):
            worker.refused_tokens = None
        worker.load, worker.draining, worker.counters = message.load, message.draining, message.counters

    def note_refused_pair(self, decode: Worker, prefill: Epoch, reason: str) -> None:
        """The prefill worker doesn't know this decode worker (any more): not used together until D reports the pair anew."""
        if prefill in decode.paired:
            decode.paired.discard(prefill)
            decode.unpaired[prefill] = reason

    def note_paired(self, worker: Worker, message: Paired) -> None:
        worker.paired.discard(message.peer)
        worker.unpaired.pop(message.peer, None)
        if self.get(message.peer) is None:
            return  # it has left meanwhile
        if message.ok:
            worker.paired.add(message.peer)
        else:
            worker.unpaired[message.peer] = why_unpaired(message)


def _check_peer_address(hello: Hello) -> Rejection | None:
    """Of a prefill worker: all decode workers will dial it."""
    if hello.role != "prefill":
        return None
    if hello.peer_address is None:
        return Rejection("peer_address", "a prefill worker needs one")
    try:
        check_address(hello.peer_address)
    except ValueError as error:
        return Rejection("peer_address", f"peer_address is {hello.peer_address!r}, but {error}")
    return None


def why_unpaired(message: Paired) -> str:
    return ": ".join(part for part in (message.field, message.reason) if part) or "no reason given"


def _is_easier(load: Load, before: Load) -> bool:
    """Something has come free, so what was refused may be offered again."""
    return (
        load.free_blocks > before.free_blocks
        or load.free_slots > before.free_slots
        or load.running + load.waiting < before.running + before.waiting
    )


def _differs(name: str, theirs: object, ours: object, whose: str) -> Rejection:
    return Rejection(name, f"{name} is {theirs!r} here, but {ours!r} at {whose}")
