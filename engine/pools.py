"""The two pools of an engine: KV blocks and state slots. A page never changes type, and nothing but its owner writes it.

Lifetimes (invariant 9). A step runs to its end, with every kernel finished, before ``EngineCore.step`` returns, and pages
are freed only between steps or at a step's end. So a freed page is touched by no step. Pages that a transfer reads or
writes belong to a sealed or a landing request; those are given back only by ``release`` and ``cancel``, which the worker
calls after its transfers have ended. There is no timer anywhere, and nothing to wait for when a page is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod

import torch
from torch import Tensor

from engine.ledger import Ledger
from engine.models.dims import ModelDims
from kernels.contract import SINK
from protocol.errors import StateAuditError
from protocol.regions import PagePart, Region, RegionName


class BlockPool(Ledger):
    """KV blocks: [num_blocks, block_floats], a block = [layers, 2, V, block_tokens, D], MTP's layers last. Block 0 is the sink.

    A full block may have several users and be kept by the cache; then nobody writes it any more.
    """

    def __init__(self, dims: ModelDims, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        super().__init__(num_blocks)
        self.block_tokens = block_tokens
        self._parts = block_parts(dims, block_tokens, dtype)
        self._shape = (num_blocks, dims.num_kv_layers, 2, dims.kv_heads, block_tokens, dims.head_dim)
        # Zeroed pages cost nothing until they are touched; no result may depend on what a free page holds.
        self.tensor = torch.zeros(num_blocks, prod(self._shape[1:]), dtype=dtype)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold positions [0, num_tokens)."""
        return -(-num_tokens // self.block_tokens)

    @property
    def block_bytes(self) -> int:
        return self.tensor.shape[1] * self.tensor.element_size()

    def copy(self, block: int, to: int) -> None:
        """All layers, MTP's too. Whoever copies a partly filled block counts on its filled positions only."""
        self.tensor[to] = self.tensor[block]

    def view(self, layer: int) -> Tensor:
        return self.tensor.view(self._shape)[:, layer]

    def region(self) -> Region:
        return _region("blocks", self.tensor, self._parts)


class StatePool(Ledger):
    """State slots: [num_slots, slot_floats], a slot = [conv.0 | ssm.0 | conv.1 | ... | hidden] and a tag. Slot 0 is the sink.

    conv window, matrix state and hidden tail of a slot are one unit: one tag says which position all of them hold
    (invariants 1 and 7). The code that writes a slot's state writes its tag; None means that it holds nothing true.
    """

    def __init__(self, dims: ModelDims, num_slots: int, dtype: torch.dtype) -> None:
        super().__init__(num_slots)
        self._dims = dims
        self._parts = slot_parts(dims, dtype)
        self.tensor = torch.zeros(num_slots, sum(prod(part.shape) for part in self._parts), dtype=dtype)
        self.tags: list[int | None] = [None] * num_slots
        self.hidden = self.part("hidden")
        """[S, d] strided over S: the hidden tails."""

    @property
    def slot_bytes(self) -> int:
        return self.tensor.shape[1] * self.tensor.element_size()

    def give(self, pages: Iterable[int]) -> list[int]:
        """As Ledger's. What is free holds nothing: its tag is None."""
        return self._untag(super().give(pages))

    def drop(self, page: int) -> bool:
        freed = super().drop(page)
        self._untag([page] if freed else [])
        return freed

    def copy(self, slot: int, to: int) -> None:
        """conv windows, matrix states, hidden tail and tag: one unit (invariant 7)."""
        self.tensor[to] = self.tensor[slot]
        self.tags[to] = self.tags[slot]

    def _untag(self, slots: list[int]) -> list[int]:
        for slot in slots:
            self.tags[slot] = None
        return slots

    def audit(self, slot: int, position: int, purpose: str) -> None:
        """Raises StateAuditError unless ``slot`` truly holds h(position) (invariant 2)."""
        if self.tags[slot] != position:
            raise StateAuditError(purpose, slot, position, self.tags[slot])

    def conv(self, layer: int) -> Tensor:
        return self.part(f"conv.{layer}")

    def ssm(self, layer: int) -> Tensor:
        return self.part(f"ssm.{layer}")

    def region(self) -> Region:
        return _region("slots", self.tensor, self._parts)

    def part(self, name: str) -> Tensor:
        """[S, *shape] strided over S: the part of every slot that ``slot_parts`` calls ``name``."""
        part = next(part for part in self._parts if part.name == name)
        start = part.offset // self.tensor.element_size()
        return self.tensor[:, start : start + prod(part.shape)].view(self.num_pages, *part.shape)


class Pools:
    """Both pools, and the per-layer views that a model sees (``engine.models.pool_views.PoolViews``)."""

    def __init__(self, dims: ModelDims, num_blocks: int, num_slots: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.blocks = BlockPool(dims, num_blocks, block_tokens, dtype)
        self.slots = StatePool(dims, num_slots, dtype)
        self._kv = [self.blocks.view(layer) for layer in range(dims.num_kv_layers)]
        self._conv = [self.slots.conv(layer) for layer in range(dims.num_recurrent_layers)]
        self._ssm = [self.slots.ssm(layer) for layer in range(dims.num_recurrent_layers)]

    def kv(self, layer: int) -> Tensor:
        return self._kv[layer]

    def conv(self, layer: int) -> Tensor:
        return self._conv[layer]

    def ssm(self, layer: int) -> Tensor:
        return self._ssm[layer]

    def regions(self) -> tuple[Region, Region]:
        return self.blocks.region(), self.slots.region()

    def check_integrity(
        self,
        used_blocks: Sequence[Sequence[int]],
        used_slots: Sequence[Sequence[int]],
        kept_blocks: Sequence[int] = (),
        kept_slots: Sequence[int] = (),
    ) -> None:
        """Every page is the sink, or free, or counts its users and the cache; no slot is shared, free ones carry no tag.

        Raises AssertionError that says what isn't so.
        """
        self.blocks.check("block", used_blocks, kept_blocks)
        self.slots.check("slot", used_slots, kept_slots)
        slots = [*chain.from_iterable(used_slots), *kept_slots]
        assert len(set(slots)) == len(slots), f"a slot has two owners: {sorted(slots)}"
        for slot in (SINK, *self.slots.free_ids()):
            assert self.slots.tags[slot] is None, f"slot {slot} is nobody's but has tag {self.slots.tags[slot]}"


def block_parts(dims: ModelDims, block_tokens: int, dtype: torch.dtype) -> tuple[PagePart, ...]:
    shape = (2, dims.kv_heads, block_tokens, dims.head_dim)
    names = [f"kv.{layer}" for layer in range(dims.num_attention_layers)]
    names += [f"mtp_kv.{layer}" for layer in range(dims.num_mtp_attention_layers)]
    return _lay_out([(name, shape, 1, ()) for name in names], dtype)


def slot_parts(dims: ModelDims, dtype: torch.dtype) -> tuple[PagePart, ...]:
    parts: list[_Shape] = []
    for layer in range(dims.num_recurrent_layers):
        parts.append((f"conv.{layer}", (dims.conv_kernel - 1, dims.conv_channels), 1, dims.conv_pieces))
        parts.append((f"ssm.{layer}", (dims.ssm_heads, dims.ssm_head_dim, dims.ssm_state), 0, ()))
    parts.append(("hidden", (dims.hidden,), None, ()))
    return _lay_out(parts, dtype)


_Shape = tuple[str, tuple[int, ...], int | None, tuple[int, ...]]


def _lay_out(shapes: Iterable[_Shape], dtype: torch.dtype) -> tuple[PagePart, ...]:
    """One part behind the other, without gaps."""
    parts: list[PagePart] = []
    offset = 0
    for name, shape, axis, pieces in shapes:
        num_bytes = prod(shape) * dtype.itemsize
        parts.append(
            PagePart(
                name=name,
                offset=offset,
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                num_bytes=num_bytes,
                partition_axis=axis,
                partition_pieces=pieces,
            )
        )
        offset += num_bytes
    return tuple(parts)


def _region(name: RegionName, tensor: Tensor, parts: tuple[PagePart, ...]) -> Region:
    # A model without attention has blocks of no bytes, and a memoryview of nothing can't be cast.
    memory = tensor.view(-1).numpy().data.cast("B") if tensor.numel() else memoryview(bytearray())
    return Region(name=name, num_pages=tensor.shape[0], page_bytes=tensor.shape[1] * tensor.element_size(), parts=parts, memory=memory)
