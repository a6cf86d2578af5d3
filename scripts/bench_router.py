"""CPU time of the router per request and per token.

A router process, a decode worker here that computes nothing, and streaming clients here. The router's own CPU time (all its threads)
is read before and after two runs that differ only in the number of output tokens: the difference gives the time per token, the rest
the time per request. ``--step-ms`` is how long the worker waits between steps: 0 lets the router read many at once, which is
cheaper; a real engine's step gives each request one message at a time.

    python -m scripts.bench_router --model demo/checkpoint
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from protocol.codec import decode_from_router, encode
from protocol.ids import RequestKey, new_epoch
from protocol.messages import Admit, Admitted, Capacity, Fingerprint, Finished, Heartbeat, Hello, Load, Message, Tokens, Welcome
from protocol.sockets import Link
from protocol.worker_link import MAX_BATCH

PROMPT_TOKENS = 100
TOKEN_ID = 100
START_S = 60.0


@dataclass(slots=True)
class Answer:
    key: RequestKey
    num_tokens: int
    sent: int = 0


class NoWorker:
    """A decode worker that answers every request with one message a step, those of a step together, as an engine does."""

    def __init__(self, control: str, model: Path, step_s: float, step_tokens: int) -> None:
        self.epoch = new_epoch()
        self._link = Link(control, self.epoch.encode())
        self._step_s, self._step_tokens = step_s, step_tokens
        self._answers: list[Answer] = []
        self._model_type = json.loads((model / "config.json").read_text())["model_type"]
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        digest = {"config_digest": "-", "weights_digest": "-", "dtype": "-", "state_dtype": "-", "layout_digest": "-"}
        fingerprint = Fingerprint(model_type=self._model_type, block_tokens=16, block_bytes=1, slot_bytes=1, mtp=False, **digest)
        capacity = Capacity(max_model_len=100_000, kv_blocks=1 << 20, state_slots=1 << 20, max_running=1 << 16, speculation=0)
        hello = Hello(epoch=self.epoch, worker_id="none", role="decode", fingerprint=fingerprint, capacity=capacity)
        await self._link.send(encode(hello))
        while not isinstance(decode_from_router.decode(await self._link.recv()), Welcome):
            pass
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat()), asyncio.create_task(self._run_steps())]

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.close()

    async def _beat(self) -> None:
        while True:
            await self._link.send(encode(Heartbeat(epoch=self.epoch, load=Load())))
            await asyncio.sleep(0.5)

    async def _receive(self) -> None:
        while True:
            message = decode_from_router.decode(await self._link.recv())
            if isinstance(message, Admit):
                self._answers.append(Answer(message.key, message.sampling.max_tokens))

    async def _run_steps(self) -> None:
        while True:
            batch = [message for answer in list(self._answers) for message in self._step(answer)]
            for start in range(0, len(batch), MAX_BATCH):
                await self._link.send(*batch[start : start + MAX_BATCH])
            await asyncio.sleep(self._step_s)

    def _step(self, answer: Answer) -> list[bytes]:
        about = {"epoch": self.epoch, "request_id": answer.key.request_id, "generation": answer.key.generation}
        messages: list[Message] = [Admitted.model_validate({**about, "needs_prefill": False})] if answer.sent == 0 else []
        tokens = (TOKEN_ID,) * min(self._step_tokens, answer.num_tokens - answer.sent)
        messages.append(Tokens.model_validate({**about, "index": answer.sent, "token_ids": tokens}))
        answer.sent += len(tokens)
        if answer.sent == answer.num_tokens:
            messages.append(Finished.model_validate({**about, "reason": "length"}))
            self._answers.remove(answer)
        return [encode(message) for message in messages]


@dataclass(frozen=True)
class Client:
    """One keep-alive connection that asks for one streamed answer after another."""

    port: int
    body: bytes

    async def run(self, num_requests: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(self.body)}\r\n\r\n"
        for _ in range(num_requests):
            writer.write(head.encode() + self.body)
            answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        writer.close()
        await writer.wait_closed()


async def measure(router: psutil.Process, port: int, num_tokens: int, num_requests: int, concurrency: int) -> float:
    """CPU seconds per request."""
    fields = {"prompt": [TOKEN_ID] * PROMPT_TOKENS, "max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    client = Client(port, json.dumps(fields).encode())
    before = _cpu_s(router)
    await asyncio.gather(*(client.run(num_requests // concurrency) for _ in range(concurrency)))
    return (_cpu_s(router) - before) / (num_requests // concurrency * concurrency)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def bench(options: argparse.Namespace) -> dict[str, float]:
    control, port = f"tcp://127.0.0.1:{options.control_port}", options.port
    arguments = ["--model", str(options.model), "--port", str(port), "--control", control, "--log-level", "warning"]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    with subprocess.Popen([sys.executable, "-m", "router", *arguments], env=environment) as process:  # noqa: ASYNC220  (starting is quick)
        try:
            worker = NoWorker(control, options.model, options.step_ms / 1000, options.step_tokens)
            await asyncio.wait_for(worker.join(), START_S)
            result = await _measure_all(psutil.Process(process.pid), options)
            await worker.leave()
            return result
        finally:
            process.terminate()


async def _measure_all(router: psutil.Process, options: argparse.Namespace) -> dict[str, float]:
    few, many = 1, options.tokens
    await measure(router, options.port, few, max(50, options.concurrency), options.concurrency)  # warm up
    await measure(router, options.port, many, options.concurrency, options.concurrency)
    per_request, per_token = [], []
    for _ in range(options.repeats):
        short = await measure(router, options.port, few, options.requests, options.concurrency)
        long = await measure(router, options.port, many, max(options.requests // 10, options.concurrency), options.concurrency)
        token_s = (long - short) / (many - few)
        per_token.append(token_s)
        per_request.append(short - token_s * few)
    return {
        "request_ms": round(statistics.median(per_request) * 1e3, 3),
        "request_ms_min": round(min(per_request) * 1e3, 3),
        "token_us": round(statistics.median(per_token) * 1e6, 2),
        "token_us_min": round(min(per_token) * 1e6, 2),
        "rss_mb": round(router.memory_info().rss / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo/checkpoint"))
    parser.add_argument("--port", type=int, default=18999)
    parser.add_argument("--control-port", type=int, default=18998)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--step-tokens", type=int, default=1, help="as speculation would give, for instance 3")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(
            json.dumps(
                runner.run(bench(options))
                | {"step_ms": options.step_ms, "step_tokens": options.step_tokens, "concurrency": options.concurrency}
            )
        )


if __name__ == "__main__":
    main()
