"""Both ends of one hand-off in one loop, over the loopback transport, with every control message through the codec."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from protocol.codec import decode_from_d, decode_from_p, encode
from protocol.ids import Epoch, RequestId, RequestKey
from protocol.messages import Fingerprint, Message, Timing
from protocol.regions import PagePart, Region
from transfer import receive, send
from transfer.checksums import page_checksums, token_digest
from transfer.commands import Commit, Compute, Ended, EndLease, Fail, GrantLease, Refuse, Say
from transfer.layout import Layout
from transfer.loopback import Faults, Loopback
from transfer.plan import blocks_for
from transfer.session import ReceiveSession, SendSession

BLOCK_TOKENS = 4
BLOCK_BYTES = 48
SLOT_BYTES = 112
KEY = RequestKey(RequestId("r"), 0)
D_EPOCH, P_EPOCH = Epoch("decode"), Epoch("prefill")


def make_layout(num_blocks: int, num_slots: int, block_bytes: int = BLOCK_BYTES, slot_bytes: int = SLOT_BYTES) -> Layout:
    def region(name: str, pages: int, size: int) -> Region:
        half = size // 2
        parts = (
            PagePart(name=f"{name}.a", offset=0, shape=(half,), dtype="uint8", num_bytes=half),
            PagePart(name=f"{name}.b", offset=half, shape=(size - half,), dtype="uint8", num_bytes=size - half),
        )
        return Region(name=name, num_pages=pages, page_bytes=size, parts=parts, memory=memoryview(bytearray(pages * size)))  # type: ignore[arg-type]

    return Layout(blocks=region("blocks", num_blocks, block_bytes), slots=region("slots", num_slots, slot_bytes))


def make_fingerprint(layout: Layout) -> Fingerprint:
    return Fingerprint(
        model_type="nemotron_h",
        config_digest="c",
        weights_digest="w",
        dtype="float32",
        state_dtype="float32",
        block_tokens=BLOCK_TOKENS,
        block_bytes=layout.blocks.page_bytes,
        slot_bytes=layout.slots.page_bytes,
        layout_digest=layout.digest,
        mtp=True,
    )


def fill_random(layout: Layout, draw: random.Random) -> None:
    for region in (layout.blocks, layout.slots):
        region.memory[:] = draw.randbytes(region.memory.nbytes)


@dataclass
class Outcome:
    """What the worker at one end was asked to do."""

    said: list[Message] = field(default_factory=list)
    failed: list[Fail] = field(default_factory=list)
    refused: list[Refuse] = field(default_factory=list)
    commits: int = 0
    computes: int = 0
    ended: list[Ended] = field(default_factory=list)
    leases: list[GrantLease | EndLease] = field(default_factory=list)


class Rig:
    """``position`` tokens from P's pages to D's, which are scattered by ``seed``."""

    def __init__(
        self,
        position: int,
        *,
        seed: int = 0,
        have_blocks: int = 0,
        checksums: bool = True,
        faults: Faults | None = None,
        max_bytes: int = 64,
    ) -> None:
        self.draw = random.Random(seed)
        self.network = Loopback(seed)
        self.p_transport, self.d_transport = self.network.transport(faults, max_bytes), self.network.transport(None, max_bytes)
        count = blocks_for(position, BLOCK_TOKENS)
        self.p_layout, self.d_layout = make_layout(count + 6, 4), make_layout(count + 9, 5)
        fill_random(self.p_layout, self.draw)
        fill_random(self.d_layout, self.draw)
        self.position = position
        self.p_blocks = tuple(self.draw.sample(range(1, count + 6), count))
        self.d_blocks = tuple(self.draw.sample(range(1, count + 9), count))
        self.p_slot, self.d_slot = self.draw.randrange(1, 4), self.draw.randrange(1, 5)
        self.tokens = tuple(range(position))
        self.checksums, self.have_blocks = checksums, have_blocks
        for index in range(have_blocks):
            self.d_layout.page("blocks", self.d_blocks[index])[:] = self.p_layout.page("blocks", self.p_blocks[index])
        self.expected = [bytes(self.p_layout.page("blocks", block)) for block in self.p_blocks]
        self.expected_slot = bytes(self.p_layout.page("slots", self.p_slot))
        self.untouched = self._rest_of_d()
        self.p, self.d = Outcome(), Outcome()
        self.control_delay_s = 0.0
        self.p_to_d, self.d_to_p = self.p_transport.connect(self.d_transport.address), self.d_transport.connect(self.p_transport.address)
        self.sender = SendSession(send.HandoffSender(KEY, P_EPOCH, make_fingerprint(self.p_layout), 30.0), self.p_layout, self._on_p)
        self.sender.connection = self.p_to_d
        reservation = receive.Reservation(
            key=KEY,
            epoch=D_EPOCH,
            peer=P_EPOCH,
            fingerprint=make_fingerprint(self.d_layout),
            blocks=self.d_blocks,
            slot=self.d_slot,
            position=position,
            token_digest=token_digest(self.tokens),
            have_blocks=have_blocks,
            checksums=checksums,
            max_bytes=max_bytes,
            first_tag=7 * receive.TAGS_PER_HANDOFF,
        )
        self.receiver = ReceiveSession(receive.HandoffReceiver(reservation), self.d_to_p, self.d_layout, self._on_d)
        self.p_to_d.on_lost(lambda reason: self.sender.feed(send.PeerGone(reason)))
        self.d_to_p.on_lost(self._on_p_lost)

    # ---- what happens --------------------------------------------------------------------------------------------

    def ready(self, first: int, stop: int) -> None:
        self.sender.feed(send.BlocksReady(first, self.p_blocks[first:stop]))

    def seal(self, timing: Timing | None = None) -> None:
        self.sender.feed(
            send.Sealed(
                position=self.position,
                token_digest=token_digest(self.tokens),
                blocks=self.p_blocks,
                slot=self.p_slot,
                block_checksums=page_checksums(self.p_layout, "blocks", self.p_blocks) if self.checksums else (),
                slot_checksum=page_checksums(self.p_layout, "slots", [self.p_slot])[0] if self.checksums else None,
                timing=timing or Timing(),
            )
        )

    async def settle(self, seconds: float = 0.0) -> None:
        """Let everything that is under way happen."""
        await asyncio.sleep(seconds)
        for _ in range(60):
            await asyncio.sleep(0)

    # ---- what came of it -----------------------------------------------------------------------------------------

    def arrived(self) -> bool:
        """Every byte that D needs is in its pages."""
        blocks = [bytes(self.d_layout.page("blocks", block)) for block in self.d_blocks]
        return blocks == self.expected and bytes(self.d_layout.page("slots", self.d_slot)) == self.expected_slot

    def check_over(self) -> None:
        """Both ends are over, once, with nothing in flight and no byte outside D's pages changed."""
        assert len(self.p.ended) == 1
        assert len(self.d.ended) == 1
        assert self.sender.machine.in_flight == self.receiver.machine.in_flight == set()
        assert self.d_transport.open_receives == 0
        assert self.d.commits + (not self.d.ended[0].ok) == 1
        assert self._rest_of_d() == self.untouched

    def _rest_of_d(self) -> list[bytes]:
        rest = [bytes(self.d_layout.page("blocks", i)) for i in range(self.d_layout.blocks.num_pages) if i not in self.d_blocks]
        return rest + [bytes(self.d_layout.page("slots", i)) for i in range(self.d_layout.slots.num_pages) if i != self.d_slot]

    def _on_p_lost(self, reason: str) -> None:
        if self.receiver.machine.state is not receive.ReceiveState.NEW:
            self.receiver.feed(receive.PeerGone(reason))

    # ---- the workers' part ---------------------------------------------------------------------------------------

    def _on_p(self, command: object) -> None:
        match command:
            case Say(message):
                self.p.said.append(message)
                self._carry(lambda: self.receiver.feed(receive.FromPrefill(decode_from_p.decode(encode(message)))))  # type: ignore[arg-type]
            case Compute():
                self.p.computes += 1
            case Refuse():
                self.p.refused.append(command)
            case GrantLease() | EndLease():
                self.p.leases.append(command)
            case Ended():
                self.p.ended.append(command)
                self._scribble(self.p_layout, self.p_blocks, self.p_slot)

    def _on_d(self, command: object) -> None:
        match command:
            case Say(message):
                self.d.said.append(message)
                self._carry(lambda: self.sender.feed(send.FromDecode(decode_from_d.decode(encode(message)))))  # type: ignore[arg-type]
            case Fail():
                self.d.failed.append(command)
            case Commit():
                self.d.commits += 1
                assert self.arrived(), "committed before every byte was right"
            case Ended():
                self.d.ended.append(command)
                if not command.ok:
                    self._scribble(self.d_layout, self.d_blocks, self.d_slot)
                    self.canary = self._pages_of_d()

    def _carry(self, deliver: object) -> None:
        if not self.p_transport.dead and not self.d_transport.dead:
            asyncio.get_running_loop().call_later(self.draw.random() * self.control_delay_s, deliver)  # type: ignore[arg-type]

    def _scribble(self, layout: Layout, blocks: tuple[int, ...], slot: int) -> None:
        """The pages have a new owner."""
        for page in [layout.page("blocks", block) for block in blocks] + [layout.page("slots", slot)]:
            page[:] = self.draw.randbytes(page.nbytes)

    def _pages_of_d(self) -> list[bytes]:
        return [bytes(self.d_layout.page("blocks", block)) for block in self.d_blocks] + [bytes(self.d_layout.page("slots", self.d_slot))]

    def canary_is_alive(self) -> bool:
        """Nothing has been written into D's pages since they were given back."""
        return self._pages_of_d() == self.canary
