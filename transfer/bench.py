"""Hand-off goodput between two real processes, beside what the same link does for others.

``python -m transfer.bench`` prints JSON: whole hand-offs (control messages, plan, scattered blocks, checksums at both ends, commit),
a plain socket with the same bytes, and ``ucx_perftest tag_bw`` over the same transport, in turns. ``selftest`` is the short form
for ``baton doctor``. Every hand-off's bytes are compared afterwards, outside the measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from protocol.codec import decode_from_p, encode
from protocol.errors import TransferError
from protocol.ids import Epoch, RequestId, RequestKey
from protocol.messages import PairHello, PairWelcome
from protocol.sockets import Hub
from transfer import receive
from transfer.bench_peer import Sizes
from transfer.checksums import token_digest
from transfer.commands import Commit, Ended, Fail, Say
from transfer.session import ReceiveSession
from transfer.ucx import UcxTransport, version

STEP_S = 30.0
"""No single step takes longer, or something is broken."""
PEER_SEED, OWN_SEED = 1, 2
WARN_BELOW = 0.5


class TwoProcesses:
    """A peer process with pages, and this one as D. ``async with`` starts and ends the peer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.epoch = Epoch("bench-d")
        self.hub = Hub("tcp://127.0.0.1:0")
        self.transport = UcxTransport()
        self.layout = sizes.layout(None)
        self.expected = sizes.layout(PEER_SEED)
        self.session: ReceiveSession | None = None
        self._count = 0

    async def __aenter__(self) -> Self:
        self.peer = _start_peer(self.hub.address)
        await self._answer("start")
        await self.order("lay out", sizes=dataclasses.asdict(self.sizes), seed=PEER_SEED)
        hello = PairHello(
            epoch=self.epoch, fingerprint=self.sizes.fingerprint(self.layout), data_address=self.transport.address, transport="ucx"
        )
        await self._say(hello)
        _, frame = await asyncio.wait_for(self.hub.recv(), STEP_S)
        welcome = decode_from_p.decode(frame[1:])
        assert isinstance(welcome, PairWelcome)
        self.peer_epoch = welcome.epoch
        self.connection = self.transport.connect(welcome.data_address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.peer.poll() is None:
            await self.hub.send(b"peer", b'J{"do": "stop"}')
            await asyncio.to_thread(self.peer.wait, STEP_S)
        self.transport.close()
        self.hub.close()

    async def order(self, what: str, **more: Any) -> None:
        await self.hub.send(b"peer", b"J" + json.dumps({"do": what, **more}).encode())
        await self._answer(what)

    async def handoff(self) -> float:
        """Seconds from the Fetch to the commit. Raises TransferError when it fails or the bytes are wrong."""
        self._count += 1
        key = RequestKey(RequestId(f"bench-{self._count}"), 0)
        await self.order("prefill", request_id=key.request_id, decode=self.epoch)
        self._wipe()
        blocks = self.sizes.place(OWN_SEED + self._count)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        machine = self._machine(key, blocks)
        self.session = ReceiveSession(machine, self.connection, self.layout, lambda command: self._on_command(command, over))
        start = time.perf_counter()
        self.session.feed(receive.Begin())
        listening = asyncio.ensure_future(self._listen(self.session))
        try:
            await asyncio.wait_for(over, STEP_S)
            seconds = time.perf_counter() - start
        finally:
            listening.cancel()
        self._compare(blocks)
        return seconds

    async def raw_socket(self) -> float:
        """Seconds for the same bytes from the peer through a plain socket, into the same pages."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            received = asyncio.ensure_future(asyncio.to_thread(self._receive_raw, server))
            await self.order("send raw", port=server.getsockname()[1])
            return await received

    def _machine(self, key: RequestKey, blocks: tuple[int, ...]) -> receive.HandoffReceiver:
        return receive.HandoffReceiver(
            receive.Reservation(
                key=key,
                epoch=self.epoch,
                peer=self.peer_epoch,
                fingerprint=self.sizes.fingerprint(self.layout),
                blocks=blocks,
                slot=1,
                position=self.sizes.position,
                token_digest=token_digest(range(self.sizes.position)),
                checksums=self.sizes.checksums,
                max_bytes=self.transport.max_message_bytes,
                first_tag=self._count * receive.TAGS_PER_HANDOFF,
            )
        )

    def _on_command(self, command: object, over: asyncio.Future[None]) -> None:
        match command:
            case Say(message):
                self._sending = asyncio.ensure_future(self._say(message))
            case Fail(_, reason) if not over.done():
                over.set_exception(TransferError(reason))
            case Commit():
                over.set_result(None)
            case Ended():
                pass

    async def _listen(self, session: ReceiveSession) -> None:
        while True:
            _, frame = await self.hub.recv()
            session.feed(receive.FromPrefill(decode_from_p.decode(frame[1:])))  # type: ignore[arg-type]

    async def _say(self, message: Any) -> None:
        await self.hub.send(b"peer", b"D" + encode(message))

    async def _answer(self, what: str) -> None:
        _, frame = await asyncio.wait_for(self.hub.recv(), STEP_S)
        assert json.loads(frame[1:]) == {"done": what}, frame[:200]

    def _wipe(self) -> None:
        for region in (self.layout.blocks, self.layout.slots):
            region.memory[:] = bytes(region.memory.nbytes)

    def _compare(self, blocks: tuple[int, ...]) -> None:
        pairs = [("blocks", theirs, ours) for theirs, ours in zip(self.sizes.place(PEER_SEED), blocks, strict=True)] + [("slots", 1, 1)]
        for region, theirs, ours in pairs:
            if self.layout.page(region, ours) != self.expected.page(region, theirs):  # type: ignore[arg-type]
                raise TransferError(f"{region}[{ours}] differs from the sender's [{theirs}]")

    def _receive_raw(self, server: socket.socket) -> float:
        raw, _ = server.accept()
        with raw:
            start = time.perf_counter()
            for page in [self.layout.page("slots", 1)] + [self.layout.page("blocks", block) for block in self.sizes.place(OWN_SEED)]:
                while page:
                    page = page[raw.recv_into(page) :]
            return time.perf_counter() - start


def _start_peer(address: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([sys.executable, "-m", "transfer.bench_peer", address], env=environment)


# ---- ucx_perftest ----------------------------------------------------------------------------------------------------


def find_perftest() -> Path | None:
    """The one in the libucx wheel, which has the same UCX as we use."""
    package = importlib.util.find_spec("libucx")
    if package is None or package.origin is None:
        return None
    binary = Path(package.origin).parent / "bin" / "ucx_perftest"
    return binary if binary.exists() else None


def perftest(num_bytes: int, iterations: int, settings: dict[str, str]) -> float:
    """GB/s of ``ucx_perftest tag_bw`` over TCP on the loopback device, messages of ``num_bytes``. Raises TransferError."""
    binary = find_perftest()
    if binary is None:
        raise TransferError("there is no ucx_perftest in the libucx package")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment = {**inherited, "LD_LIBRARY_PATH": str(binary.parent.parent / "lib"), "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", **settings}
    command = [str(binary), "-p", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        told = subprocess.run(
            [*command, "127.0.0.1", "-t", "tag_bw", "-s", str(num_bytes), "-n", str(iterations), "-w", "2", "-f"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise TransferError(f"ucx_perftest failed: {error}") from None
    finally:
        server.kill()
        server.wait()
    numbers = re.findall(r"\d+(?:\.\d+)?", told.stdout.strip().splitlines()[-1])
    return float(numbers[5]) * 2**20 / 1e9  # column 6: overall average, in MB/s of 2**20 bytes


def _wait_for_port(port: int) -> None:
    """Without connecting: ucx_perftest takes the first connection for its client."""
    wanted = f":{port:04X} "
    for _ in range(200):
        if any(wanted in line and " 0A " in line for line in Path("/proc/net/tcp").read_text().splitlines()):
            return
        time.sleep(0.01)
    raise TransferError("ucx_perftest doesn't listen")


OUR_SETTINGS = {name: os.environ[name] for name in ("UCX_RNDV_THRESH", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE") if name in os.environ}


# ---- whole benchmark -------------------------------------------------------------------------------------------------


async def bench(sizes: Sizes, runs: int) -> dict[str, Any]:
    """Medians and spreads in GB/s (10**9 bytes), all of them in turns, so that other load hits all alike."""
    figures: dict[str, list[float]] = {"handoff": [], "raw_socket": [], "perftest_default": [], "perftest_our_settings": []}
    async with TwoProcesses(sizes) as two:

        async def timed(name: str, measure: Callable[[], Awaitable[float]]) -> None:
            figures[name].append(sizes.num_bytes / await measure() / 1e9)

        await two.handoff()
        await two.raw_socket()
        for _ in range(runs):
            for _ in range(3):
                await timed("handoff", two.handoff)
                await timed("raw_socket", two.raw_socket)
            if find_perftest() is not None:
                figures["perftest_default"].append(await asyncio.to_thread(perftest, sizes.num_bytes, 6, {}))
                figures["perftest_our_settings"].append(await asyncio.to_thread(perftest, sizes.num_bytes, 6, OUR_SETTINGS))
    return {
        "what": "hand-off goodput between two processes, GB/s",
        "bytes": sizes.num_bytes,
        "sizes": dataclasses.asdict(sizes),
        "versions": version(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "figures": {name: _spread(values) for name, values in figures.items() if values},
        "handoff_over": {
            name: round(statistics.median(figures["handoff"]) / statistics.median(values), 3)
            for name, values in figures.items()
            if values and name != "handoff"
        },
    }


def _spread(values: list[float]) -> dict[str, float | int]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class LinkReport:
    """What ``baton doctor`` prints. GB/s, medians."""

    ucx: float
    socket: float
    warning: str | None

    @property
    def ratio(self) -> float:
        return self.ucx / self.socket


async def selftest(runs: int = 5) -> LinkReport:
    """Hand-offs beside a plain socket, a second or two. Raises TransferError when bytes don't arrive."""
    sizes = Sizes(run_blocks=4)
    async with TwoProcesses(sizes) as two:
        await two.handoff()
        handoffs, raws = [], []
        for _ in range(runs):
            handoffs.append(sizes.num_bytes / await two.handoff() / 1e9)
            raws.append(sizes.num_bytes / await two.raw_socket() / 1e9)
    ucx, raw = statistics.median(handoffs), statistics.median(raws)
    slow = f"hand-offs reach {ucx / raw:.0%} of a plain socket; look at the UCX_* variables" if ucx < WARN_BELOW * raw else None
    return LinkReport(ucx, raw, slow)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hand-off goodput, as JSON.")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--run-blocks", type=int, default=1, help="adjacent blocks at both ends")
    parser.add_argument("--no-checksums", action="store_true")
    given = parser.parse_args(arguments)
    sizes = Sizes(run_blocks=given.run_blocks, checksums=not given.no_checksums)
    print(json.dumps(asyncio.run(bench(sizes, given.runs)), indent=2))


if __name__ == "__main__":
    main()
