"""The other process of the hand-off benchmark, the link's self test and their tests: a P with made-up pages.

``python -m transfer.bench_peer ADDRESS`` dials the Hub at ADDRESS and serves until it is told to stop or the Hub goes silent. Frames are
one letter and a body: D a message of protocol (D -> P), J a JSON order; back: P a message, J a JSON answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from dataclasses import dataclass
from typing import Any

from protocol.codec import decode_from_d, encode
from protocol.ids import Epoch, RequestId, RequestKey
from protocol.messages import Fetch, Fingerprint, PairHello, PairWelcome, Pull, Release, Timing
from protocol.regions import PagePart, Region, RegionName
from protocol.sockets import Link
from transfer import send
from transfer.checksums import page_checksums, token_digest
from transfer.commands import Compute, Ended, Say
from transfer.layout import Layout
from transfer.session import SendSession
from transfer.ucx import UcxTransport

BLOCK_TOKENS = 16
ORPHANED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a made-up hand-off. Defaults: 20 MB of state and 32 MB of KV in blocks of a 127M-parameter model."""

    block_bytes: int = 3 * 2 * 4 * 16 * 64 * 4
    num_blocks: int = 32 * 10**6 // (3 * 2 * 4 * 16 * 64 * 4) + 1
    slot_bytes: int = 20 * 10**6
    run_blocks: int = 1
    """Blocks lie in shuffled runs of this length; 1: no two are adjacent but by chance."""
    checksums: bool = True

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.slot_bytes

    @property
    def position(self) -> int:
        return self.num_blocks * BLOCK_TOKENS

    def place(self, seed: int) -> tuple[int, ...]:
        """Block ids of the hand-off in a pool of ``num_blocks`` + 1 pages."""
        runs = [
            list(range(first, min(first + self.run_blocks, self.num_blocks + 1)))
            for first in range(1, self.num_blocks + 1, self.run_blocks)
        ]
        random.Random(seed).shuffle(runs)
        return tuple(block for run in runs for block in run)

    def layout(self, seed: int | None) -> Layout:
        """Two slots; pages random by ``seed``, or zeros."""
        return Layout(
            blocks=_region("blocks", self.num_blocks + 1, self.block_bytes, seed), slots=_region("slots", 2, self.slot_bytes, seed)
        )

    def fingerprint(self, layout: Layout) -> Fingerprint:
        return Fingerprint(
            model_type="bench",
            config_digest="",
            weights_digest="",
            dtype="float32",
            state_dtype="float32",
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.block_bytes,
            slot_bytes=self.slot_bytes,
            layout_digest=layout.digest,
            mtp=False,
        )


def _region(name: RegionName, num_pages: int, page_bytes: int, seed: int | None) -> Region:
    size = num_pages * page_bytes
    memory = memoryview(bytearray(size if seed is None else random.Random(f"{name}{seed}").randbytes(size)))
    part = PagePart(name=name, offset=0, shape=(page_bytes,), dtype="uint8", num_bytes=page_bytes)
    return Region(name=name, num_pages=num_pages, page_bytes=page_bytes, parts=(part,), memory=memory)


class Peer:
    """P: answers one D, computes nothing, seals what it has as soon as it is fetched."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._epoch = Epoch("bench-p")
        self._transport = UcxTransport()
        self._sizes = Sizes()
        self._layout = self._sizes.layout(None)
        self._connection: Any = None
        self._sessions: dict[RequestKey, SendSession] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        while True:
            try:
                frame = await asyncio.wait_for(self._link.recv(), ORPHANED_S)
            except TimeoutError:
                frame = b'J{"do": "stop"}'
            if frame[:1] == b"D":
                self._on_message(frame[1:])
            elif not await self._on_order(json.loads(frame[1:])):
                self._transport.close()
                return

    async def _on_order(self, order: dict[str, Any]) -> bool:
        match order["do"]:
            case "lay out":
                self._sizes = Sizes(**order["sizes"])
                self._layout = self._sizes.layout(order["seed"])
                self._seed = order["seed"]
            case "prefill":
                self._session(RequestKey(RequestId(order["request_id"]), 0)).feed(send.PrefillAsked(Epoch(order["decode"])))
            case "send raw":
                await asyncio.to_thread(self._send_raw, order["port"])
            case "stop":
                return False
        await self._link.send(b"J" + json.dumps({"done": order["do"]}).encode())
        return True

    def _send_raw(self, port: int) -> None:
        """The same bytes through a plain socket."""
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(self._layout.page("slots", 1))
            for block in self._sizes.place(self._seed):
                raw.sendall(self._layout.page("blocks", block))

    def _on_message(self, data: bytes) -> None:
        message = decode_from_d.decode(data)
        if isinstance(message, PairHello):
            self._connection = self._transport.connect(message.data_address)
            fingerprint = self._sizes.fingerprint(self._layout)
            self._say(
                PairWelcome(
                    epoch=self._epoch, fingerprint=fingerprint, data_address=self._transport.address, transport=self._transport.name
                )
            )
        elif isinstance(message, Fetch | Pull | Release):
            session = self._session(message.key)
            session.connection = self._connection
            session.feed(send.FromDecode(message))
            if isinstance(message, Fetch):
                self._in_background(self._seal(session))

    async def _seal(self, session: SendSession) -> None:
        """Blocks are said to be ready first, as after a last chunk; they travel while the checksums are made."""
        sizes, blocks = self._sizes, self._sizes.place(self._seed)
        session.feed(send.BlocksReady(0, blocks))
        block_checksums: tuple[int, ...] = ()
        slot_checksum = None
        if sizes.checksums:
            slot_checksum = (await asyncio.to_thread(page_checksums, self._layout, "slots", [1]))[0]
            block_checksums = await asyncio.to_thread(page_checksums, self._layout, "blocks", blocks)
        session.feed(
            send.Sealed(
                position=sizes.position,
                token_digest=token_digest(range(sizes.position)),
                blocks=blocks,
                slot=1,
                block_checksums=block_checksums,
                slot_checksum=slot_checksum,
                timing=Timing(),
            )
        )

    def _session(self, key: RequestKey) -> SendSession:
        if key not in self._sessions:
            machine = send.HandoffSender(key, self._epoch, self._sizes.fingerprint(self._layout), 30.0)
            self._sessions[key] = SendSession(machine, self._layout, lambda command: self._on_command(key, command))
        return self._sessions[key]

    def _on_command(self, key: RequestKey, command: object) -> None:
        match command:
            case Say(message):
                self._say(message)
            case Ended():
                del self._sessions[key]
            case Compute():
                pass  # all pages have their bytes already

    def _say(self, message: Any) -> None:
        self._in_background(self._link.send(b"P" + encode(message)))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def main(address: str) -> None:
    with Link(address, b"peer") as link:
        await link.send(b"J" + json.dumps({"done": "start"}).encode())
        await Peer(link).serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
