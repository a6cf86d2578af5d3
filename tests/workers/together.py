"""A prefill and a decode worker in one process, over the loopback transport, with a router played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.core import EngineCore
from prefill_worker.worker import PrefillWorker
from protocol.codec import decode_from_worker, encode
from protocol.config import DecodeSettings, PrefillSettings
from protocol.ids import Epoch, RequestId, RequestKey, new_epoch
from protocol.messages import (
    Admit,
    Admitted,
    CacheFlushed,
    CacheUse,
    Cancel,
    Cancelled,
    Failed,
    Finished,
    FlushCache,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    Message,
    Paired,
    Peers,
    Prefill,
    PrefillDone,
    PrefillPlace,
    Refused,
    RequestMessage,
    Role,
    Tokens,
    Welcome,
    WorkerToRouter,
)
from protocol.sampling import SamplingParams
from protocol.sockets import Hub
from transfer.loopback import Faults, Loopback, LoopbackTransport

PATIENCE_S = 60.0
SHARED = CacheUse()
"""Prefixes are shared with everybody."""


@dataclass
class Story:
    """What both workers told about one request. Asserts what every router relies on."""

    key: RequestKey
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    needs_prefill: bool | None = None
    tokens: list[int] = field(default_factory=list)
    first: Tokens | None = None
    decode_ending: RequestMessage | None = None
    prefill_ending: RequestMessage | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, role: str, message: RequestMessage) -> None:
        if role == "prefill":
            assert isinstance(message, (Refused, PrefillDone, Failed, Cancelled)), message
            assert self.prefill_ending is None, f"{message} after {self.prefill_ending}"
            self.prefill_ending = message
            return
        assert self.decode_ending is None, f"{message} after {self.decode_ending}"
        match message:
            case Admitted():
                assert not self.admitted.is_set()
                self.needs_prefill = message.needs_prefill
                self.admitted.set()
            case Tokens():
                assert self.admitted.is_set()
                assert message.index == len(self.tokens), "a gap or a repetition"
                assert (message.timing is None) == (self.first is not None), "timing comes once, with the first tokens"
                assert (message.cached_tokens is None) == (message.timing is None)
                self.first = self.first or message
                self.tokens += message.token_ids
            case Refused() | Finished() | Failed() | Cancelled():
                self.decode_ending = message
                self.ended.set()
            case _:
                raise AssertionError(message)

    @property
    def cached_tokens(self) -> int:
        assert self.first is not None
        assert self.first.cached_tokens is not None
        return self.first.cached_tokens

    @property
    def transfer_bytes(self) -> int:
        assert self.first is not None
        assert self.first.timing is not None
        return self.first.timing.transfer_bytes

    async def end(self) -> RequestMessage:
        """What D told. P has a socket of its own: its word may come before or after."""
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()
        assert self.decode_ending is not None
        return self.decode_ending


class Router:
    """Says what a router says. Every message about a request goes into its story."""

    def __init__(self) -> None:
        self.epoch = new_epoch()
        self.hub = Hub("tcp://127.0.0.1:0")
        self.hellos: dict[Epoch, Hello] = {}
        self.paired: dict[Epoch, Paired] = {}
        self.heartbeats: dict[Epoch, Heartbeat] = {}
        self.gone: set[Epoch] = set()
        self.flushed: dict[tuple[Epoch, int], CacheFlushed] = {}
        self.stories: dict[RequestKey, Story] = {}
        self.changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            _, data = await self.hub.recv()
            message: WorkerToRouter = decode_from_worker.decode(data)
            await self._hear(message)
            self.changed.set()

    async def _hear(self, message: WorkerToRouter) -> None:
        match message:
            case Hello():
                self.hellos[message.epoch] = message
                await self.tell(message.epoch, Welcome(epoch=self.epoch, heartbeat_s=0.05))
                for epoch in self.epochs("decode"):
                    await self.tell(epoch, Peers(epoch=self.epoch, prefill=tuple(self.place(p) for p in self.epochs("prefill"))))
            case Heartbeat():
                self.heartbeats[message.epoch] = message
            case Paired():
                self.paired[message.epoch] = message
            case CacheFlushed():
                self.flushed[message.epoch, message.number] = message
            case Goodbye():
                self.gone.add(message.epoch)
            case RequestMessage():
                self.stories[message.key].hear(self.hellos[message.epoch].role, message)

    def epochs(self, role: str) -> list[Epoch]:
        return [epoch for epoch, hello in self.hellos.items() if hello.role == role]

    def place(self, epoch: Epoch) -> PrefillPlace:
        hello = self.hellos[epoch]
        assert hello.peer_address is not None
        return PrefillPlace(worker_id=hello.worker_id, epoch=epoch, address=hello.peer_address)

    async def tell(self, epoch: Epoch, message: Message) -> None:
        assert await self.hub.send(epoch.encode(), encode(message))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Looked at after every message."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def admit(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        remote: bool = True,
        generation: int = 0,
        cache: CacheUse = SHARED,
        local_tokens: int = 0,
        **params: Any,
    ) -> Story:
        """Only the first half: D was asked."""
        key = RequestKey(RequestId(name), generation)
        story = self.stories[key] = Story(key)
        place = self.place(self.epochs("prefill")[0]) if remote else None
        sampling = SamplingParams(**({"ignore_eos": True} | params))
        admit = Admit(
            epoch=self.epoch,
            request_id=key.request_id,
            generation=generation,
            token_ids=tuple(tokens),
            sampling=sampling,
            prefill=place,
            cache=cache,
            local_tokens=local_tokens,
        )
        await self.tell(self.epochs("decode")[0], admit)
        return story

    async def prefill(self, story: Story, tokens: Sequence[int], *, cache: CacheUse = SHARED) -> None:
        """The other half: P was asked. ``tokens``: the whole prompt."""
        message = Prefill(
            epoch=self.epoch,
            request_id=story.key.request_id,
            generation=story.key.generation,
            token_ids=tuple(tokens[:-1]),
            decode_epoch=self.epochs("decode")[0],
            cache=cache,
        )
        await self.tell(self.epochs("prefill")[0], message)

    async def prefill_end(self, story: Story) -> RequestMessage:
        """What P told."""
        await self.until(lambda: story.prefill_ending is not None)
        assert story.prefill_ending is not None
        return story.prefill_ending

    async def ask(self, name: str, tokens: Sequence[int], *, cache: CacheUse = SHARED, **params: Any) -> Story:
        """The whole of it: D admits, then P computes if D needs it."""
        story = await self.admit(name, tokens, remote=len(tokens) > 1, cache=cache, **params)
        await self.until(lambda: story.admitted.is_set() or story.ended.is_set())
        if story.needs_prefill:
            await self.prefill(story, tokens, cache=cache)
        return story

    async def flush(self, role: str) -> CacheFlushed:
        """The caches of one worker, and what it says to that."""
        (epoch,), number = self.epochs(role), len(self.flushed)
        await self.tell(epoch, FlushCache(epoch=self.epoch, number=number))
        await self.until(lambda: (epoch, number) in self.flushed)
        return self.flushed[epoch, number]

    async def cancel(self, story: Story) -> None:
        for epoch in self.hellos:
            await self.tell(epoch, Cancel(epoch=self.epoch, request_id=story.key.request_id, generation=story.key.generation))


@dataclass
class Together:
    router: Router
    prefill: PrefillWorker
    decode: DecodeWorker
    p_transport: LoopbackTransport
    d_transport: LoopbackTransport
    p_task: asyncio.Task[None]
    d_task: asyncio.Task[None]
    may_fail: bool = False
    """A worker was meant to end with an error."""

    async def whole(self) -> None:
        """Everything comes back: no request, no hand-off, no receive, every page free and every pool true."""
        for worker in (self.prefill, self.decode):
            await until(lambda worker=worker: not (worker.requests.num_open or self.d_transport.open_receives))  # type: ignore[misc]
            await worker.bridge.call(lambda core: core.check_integrity())
            load = await worker.bridge.call(lambda core: core.load())
            assert (load.waiting, load.running, load.held_for_peers) == (0, 0, 0)
            assert load.free_blocks == worker.core.capacity.num_blocks - 1
            assert load.free_slots == worker.core.capacity.num_slots - 1


async def until(holds: Callable[[], object]) -> None:
    """Of what has no event: logs, files, another thread's work."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def make_core(path: Path, **config: Any) -> EngineCore:
    settings: dict[str, Any] = {
        "block_tokens": 4,
        "kv_blocks": 64,
        "max_running": 4,
        "step_tokens": 16,
        "max_prefill_chunk": 8,
        "kernels": "torch",
    }
    return EngineCore(EngineConfig(model=path, **(settings | config)))


@contextlib.asynccontextmanager
async def together(
    path: Path,
    *,
    faults: Faults | None = None,
    other_model: Path | None = None,
    pairs: bool = True,
    speculation: int = 0,
    lease_s: float = 600.0,
    drain_timeout_s: float = PATIENCE_S,
    without_cache: Role | None = None,
    **config: Any,
) -> AsyncIterator[Together]:
    """``faults`` befall what P sends. ``other_model`` is D's, if it isn't P's. ``without_cache``: this worker keeps no prefixes."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    router = Router()
    network = Loopback()
    p_transport, d_transport = network.transport(faults), network.transport()
    common: dict[str, Any] = {"model": path, "control": router.hub.address, "drain_timeout_s": drain_timeout_s}
    hub = Hub("tcp://127.0.0.1:0")
    prefill = PrefillWorker(
        PrefillSettings(worker_id="p", lease_s=lease_s, **common),
        make_core(path, **(config | ({"prefix_cache": False} if without_cache == "prefill" else {}))),
        hub,
        hub.address,
        p_transport,
        "loopback",
    )
    decode = DecodeWorker(
        DecodeSettings(worker_id="d", speculation=speculation, **common),
        make_core(
            other_model or path, speculation=speculation, **(config | ({"prefix_cache": False} if without_cache == "decode" else {}))
        ),
        d_transport,
        "loopback",
    )
    tasks = [asyncio.create_task(part) for part in (router.run(), prefill.run(), decode.run())]
    try:
        await router.until(lambda: len(router.hellos) == 2 and (not pairs or bool(router.paired)))
        cluster = Together(router, prefill, decode, p_transport, d_transport, tasks[1], tasks[2])
        yield cluster
        assert not failures
        for task in tasks:
            assert cluster.may_fail or not task.done() or task.exception() is None, task.exception()
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        router.hub.close()


__all__ = ["PATIENCE_S", "HelloAgain", "Router", "Story", "Together", "make_core", "together", "until"]
