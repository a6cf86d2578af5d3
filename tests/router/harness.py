"""A real router on real sockets, and workers that speak the real protocol but compute nothing: they answer as a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx

from protocol.codec import decode_from_router, encode
from protocol.config import RouterSettings
from protocol.ids import RequestKey, new_epoch
from protocol.messages import (
    Admit,
    Admitted,
    Cancel,
    Capacity,
    Fingerprint,
    Finished,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    HelloAgain,
    Load,
    Paired,
    Peers,
    Prefill,
    PrefillDone,
    Role,
    Timing,
    TokenLogprob,
    Tokens,
    Welcome,
)
from protocol.sockets import Link
from router.server import Router
from router.tokenizer import Tokenizer

MODEL_LEN = 256
EOS = "<|im_end|>"
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", EOS)
CHAT_TEMPLATE = Path(__file__).parents[2] / "demo" / "chat_template.jinja"
PATIENCE_S = 60.0
"""Bound of every wait."""

T = TypeVar("T")


def fingerprint(**changes: Any) -> Fingerprint:
    values: dict[str, Any] = {
        "model_type": "nemotron_h",
        "config_digest": "c",
        "weights_digest": "w",
        "dtype": "float32",
        "state_dtype": "float32",
        "block_tokens": 16,
        "block_bytes": 64,
        "slot_bytes": 64,
        "layout_digest": "l",
        "mtp": True,
    }
    return Fingerprint(**(values | changes))


Step = tuple[int, ...]


@dataclass
class Script:
    """What a decode worker answers: output tokens step by step, then why it finished."""

    steps: Sequence[Step]
    reason: FinishReason = "stop"
    logprobs: Sequence[TokenLogprob] | None = None
    """Of all tokens in order."""
    stop_token_id: int | None = None
    cached_tokens: int = 0
    needs_prefill: bool | None = None
    """None: whenever the router named a prefill worker."""
    pause_s: float = 0.0
    """Before each step."""


class FakeWorker:
    """A worker's end of the control plane. What the router says is kept until a test or a script asks for it."""

    role: Role

    def __init__(self, control: str, worker_id: str, *, prints: Fingerprint | None = None, capacity: dict[str, int] | None = None) -> None:
        self.epoch = new_epoch()
        self.worker_id = worker_id
        self.prints = prints or fingerprint()
        self.capacity = Capacity(
            **({"max_model_len": MODEL_LEN, "kv_blocks": 100, "state_slots": 20, "max_running": 4, "speculation": 3} | (capacity or {}))
        )
        self.load = Load(free_blocks=99)
        self.draining = False
        self.counters: dict[str, float] = {}
        self.info = {"kernels": "native: built and checked", "transport": "fake 1.0"}
        self.heard: list[Any] = []
        self._new = asyncio.Condition()
        self._link = Link(control, self.epoch.encode())
        self._tasks: list[asyncio.Task[None]] = []
        self._dead = False

    # ---- life

    async def join(self, *, beat: bool = True) -> None:
        self._tasks.append(asyncio.create_task(self._receive()))
        await self.say_hello()
        await self.expect(Welcome)
        if beat:
            self._tasks.append(asyncio.create_task(self._beat()))

    async def say_hello(self) -> None:
        peer_address = "tcp://127.0.0.1:1" if self.role == "prefill" else None
        await self.send(
            Hello(
                epoch=self.epoch,
                worker_id=self.worker_id,
                role=self.role,
                fingerprint=self.prints,
                capacity=self.capacity,
                peer_address=peer_address,
                info=self.info,
            )
        )

    async def greet(self) -> None:
        """Hello without waiting for the answer."""
        self._tasks.append(asyncio.create_task(self._receive()))
        await self.say_hello()

    async def leave(self) -> None:
        await self.send(Goodbye(epoch=self.epoch))

    async def die(self) -> None:
        """At once and without a word, as after SIGKILL. May be called twice."""
        if self._dead:
            return
        self._dead = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._link.close()

    async def stop_beating(self) -> None:
        """As after SIGSTOP: connected but silent."""
        self._tasks.pop().cancel()

    async def beat(self) -> None:
        await self.send(Heartbeat(epoch=self.epoch, load=self.load, draining=self.draining, counters=self.counters))

    async def _beat(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.2)

    # ---- talk

    async def send(self, message: Any) -> None:
        assert await self._link.send(encode(message))

    async def send_raw(self, data: bytes) -> None:
        assert await self._link.send(data)

    async def expect(self, kind: type[T]) -> T:
        """The oldest message of this kind that wasn't asked for yet."""
        found = await within(self._take(kind))
        assert isinstance(found, kind)
        return found

    def got(self, kind: type[T]) -> list[T]:
        """Those that weren't asked for yet."""
        return [message for message in self.heard if isinstance(message, kind)]

    async def _take(self, kind: type[Any]) -> Any:
        async with self._new:
            await self._new.wait_for(lambda: any(isinstance(message, kind) for message in self.heard))
            found = next(message for message in self.heard if isinstance(message, kind))
            self.heard.remove(found)
            return found

    async def _receive(self) -> None:
        while True:
            message = decode_from_router.decode(await self._link.recv())
            if isinstance(message, HelloAgain):
                await self.say_hello()
            await self.on_message(message)
            async with self._new:
                self.heard.append(message)
                self._new.notify_all()

    async def on_message(self, message: Any) -> None: ...

    def about(self, key: RequestKey) -> dict[str, Any]:
        return {"epoch": self.epoch, "request_id": key.request_id, "generation": key.generation}


class FakeDecode(FakeWorker):
    """With a ``script`` it plays it for every request; without one a test plays it by hand."""

    role = "decode"

    def __init__(self, control: str, worker_id: str, **changes: Any) -> None:
        super().__init__(control, worker_id, **changes)
        self.script: Callable[[Admit], Script] | None = None
        self.prefilled: dict[RequestKey, asyncio.Event] = {}
        self.partners: list[FakePrefill] = []
        self._playing: dict[RequestKey, asyncio.Task[None]] = {}

    async def on_message(self, message: Any) -> None:
        if isinstance(message, Peers):
            for place in message.prefill:
                if any(partner.epoch == place.epoch for partner in self.partners):
                    await self.send(Paired(epoch=self.epoch, peer=place.epoch, ok=True))
        elif isinstance(message, Admit) and self.script is not None:
            self._playing[message.key] = asyncio.create_task(self._play(message, self.script(message)))
        elif isinstance(message, Cancel) and message.key in self._playing:
            self._playing.pop(message.key).cancel()

    @property
    def playing(self) -> bool:
        return any(not task.done() for task in self._playing.values())

    async def die(self) -> None:
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        await super().die()

    async def _play(self, admit: Admit, script: Script) -> None:
        done = self.prefilled.setdefault(admit.key, asyncio.Event())
        needed = admit.prefill is not None if script.needs_prefill is None else script.needs_prefill
        await self.admit(admit, needs_prefill=needed)
        if needed:
            await within(done.wait())
        sent = 0
        for step in script.steps:
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            logprobs = script.logprobs[sent : sent + len(step)] if script.logprobs is not None else None
            await self.tokens(admit.key, sent, step, logprobs, cached_tokens=script.cached_tokens)
            sent += len(step)
        await self.finish(admit.key, script.reason, stop_token_id=script.stop_token_id)

    async def admit(self, admit: Admit, *, needs_prefill: bool | None = None) -> None:
        needed = admit.prefill is not None if needs_prefill is None else needs_prefill
        await self.send(Admitted(**self.about(admit.key), needs_prefill=needed))

    async def tokens(
        self,
        key: RequestKey,
        index: int,
        step: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        cached_tokens: int = 0,
    ) -> None:
        timing = Timing(queue_s=0.001, prefill_s=0.02, transfer_s=0.003, decode_wait_s=0.004, transfer_bytes=1000) if index == 0 else None
        await self.send(
            Tokens(
                **self.about(key),
                index=index,
                token_ids=tuple(step),
                logprobs=tuple(logprobs) if logprobs is not None else None,
                timing=timing,
                cached_tokens=cached_tokens if index == 0 else None,
            )
        )

    async def finish(self, key: RequestKey, reason: FinishReason = "stop", **more: Any) -> None:
        await self.send(Finished(**self.about(key), reason=reason, steps=3, proposed_drafts=9, accepted_drafts=5, **more))


class FakePrefill(FakeWorker):
    """Seals at once and lets its decode partners know, as the manifest would; ``hold`` leaves that to the test."""

    role = "prefill"

    def __init__(self, control: str, worker_id: str, **changes: Any) -> None:
        super().__init__(control, worker_id, **changes)
        self.hold = False
        self.partners: list[FakeDecode] = []

    async def on_message(self, message: Any) -> None:
        if isinstance(message, Prefill) and not self.hold:
            await self.seal(message)

    async def seal(self, prefill: Prefill) -> None:
        await self.send(PrefillDone(**self.about(prefill.key), timing=Timing(prefill_s=0.02)))
        for partner in self.partners:
            if partner.epoch == prefill.decode_epoch:
                partner.prefilled.setdefault(prefill.key, asyncio.Event()).set()


@dataclass
class Harness:
    """A router, a client, and the workers that a test lets join."""

    router: Router
    client: httpx.AsyncClient
    tokenizer: Tokenizer
    task: asyncio.Task[None]
    workers: list[FakeWorker] = field(default_factory=list)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def decode(self, worker_id: str | None = None, *, join: bool = True, **changes: Any) -> FakeDecode:
        worker = FakeDecode(self.router.control, worker_id or f"d{next(self._names)}", **changes)
        worker.partners = [other for other in self.workers if isinstance(other, FakePrefill)]
        return await self._add(worker, join)

    async def prefill(self, worker_id: str | None = None, *, join: bool = True, **changes: Any) -> FakePrefill:
        worker = FakePrefill(self.router.control, worker_id or f"p{next(self._names)}", **changes)
        return await self._add(worker, join)

    async def pair(self) -> tuple[FakePrefill, FakeDecode]:
        """One of each, paired."""
        prefill, decode = await self.prefill(), await self.decode()
        prefill.partners.append(decode)
        await until(lambda: any(worker.paired for worker in self.router.cluster.table.decodes))
        return prefill, decode

    async def _add(self, worker: T, join: bool) -> T:
        assert isinstance(worker, FakeWorker)
        self.workers.append(worker)
        if join:
            await worker.join()
        return worker

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def eos(self) -> int:
        return SPECIAL.index(EOS)

    def says(self, text: str, *, per_step: int = 1, **more: Any) -> Callable[[Admit], Script]:
        """Every request is answered with this text and EOS, or cut at its max_tokens."""
        output = (*self.ids(text), self.eos)

        def script(admit: Admit) -> Script:
            tokens = output[: admit.sampling.max_tokens]
            steps = [tuple(tokens[at : at + per_step]) for at in range(0, len(tokens), per_step)]
            stopped = tokens[-1] == self.eos
            return Script(steps, "stop" if stopped else "length", stop_token_id=self.eos if stopped else None, **more)

        return script

    async def complete(self, prompt: Any = "hello world", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    async def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields})

    async def metric(self, name: str) -> float:
        """The value of this line of /metrics, with labels if it has any; 0 if it isn't there."""
        text = (await self.client.get("/metrics")).text
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[0] == name), 0.0)


@contextlib.asynccontextmanager
async def running(model_dir: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> AsyncIterator[Harness]:
    router = Router(RouterSettings(**{"model": model_dir, "port": 0, "control": "tcp://127.0.0.1:0", **settings}))
    task = asyncio.create_task(router.run())
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, trust_env=False, verify=False) as client:
            harness = Harness(router, client, tokenizer, task)
            await until(lambda: router.started or task.done())
            yield harness
            await until(lambda: router.cluster.num_requests == 0)
            assert all(not worker.requests for worker in router.cluster.table), "a booking is left"
            for worker in harness.workers:
                await worker.die()
    finally:
        with mock.patch("router.server.FLUSH_S", 0.0):  # nobody is there to hear a last cancel
            router.stop()
            await within(task)


StartRouter = Callable[..., Awaitable[Harness]]


async def within(awaitable: Awaitable[T], seconds: float = PATIENCE_S) -> T:
    return await asyncio.wait_for(awaitable, seconds)


async def until(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    async def poll() -> None:
        while not holds():  # noqa: ASYNC110  (anything may be waited for)
            await asyncio.sleep(0.005)

    await within(poll(), seconds)


def events(response: httpx.Response) -> list[Any]:
    """The data of a whole event stream, [DONE] as it is."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
