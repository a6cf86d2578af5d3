"""The two pools of an engine: KV blocks and state slots. A page never changes type, and nothing but its owner writes it.

Lifetimes (invariant 9). A step runs to its end, with every kernel finished, before ``EngineCore.step`` returns, and pages
are freed only between steps or at a step's end. So a freed page is touched by no step. Pages that a transfer reads or
writes belong to a sealed or a landing request; those are given back only by ``release`` and ``cancel``, which the worker
calls after its transfers have ended. There is no timer anywhere, and nothing to wait for when a page is handed out again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from engine.models.dims import ModelDims
from kernels.contract import SINK
from protocol.errors import StateAuditError
from protocol.regions import PagePart, Region, RegionName


class FreeRuns:
    """Free page ids, kept as runs of adjacent ones, so that a request's pages are few large pieces to a transfer."""

    def __init__(self, first: int, count: int) -> None:
        self._starts: list[int] = [first] if count else []
        self._lengths: dict[int, int] = {first: count} if count else {}
        self.count = count

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` ids, ascending within each run: those right behind ``after`` first, then the run that fits best.

        Precondition: count <= self.count.
        """
        assert count <= self.count, f"{count} pages asked for, {self.count} free"
        taken: list[int] = []
        if after is not None and after + 1 in self._lengths:
            taken += self._cut(after + 1, min(count, self._lengths[after + 1]))
        while len(taken) < count:
            missing = count - len(taken)
            start = self._best_run(missing)
            taken += self._cut(start, min(missing, self._lengths[start]))
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Precondition: none of them is free."""
        for page in ids:
            self._give_one(page)

    def ids(self) -> list[int]:
        return [page for start in self._starts for page in range(start, start + self._lengths[start])]

    def _best_run(self, count: int) -> int:
        """The shortest run that holds ``count``, else the longest; the lowest of equals."""
        return min(self._starts, key=lambda start: (self._lengths[start] < count, abs(self._lengths[start] - count), start))

    def _cut(self, start: int, count: int) -> list[int]:
        length = self._lengths.pop(start)
        self._starts.remove(start)
        if count < length:
            self._insert(start + count, length - count)
        self.count -= count
        return list(range(start, start + count))

    def _give_one(self, page: int) -> None:
        start, length = page, 1
        index = bisect_left(self._starts, page)
        if index > 0 and self._starts[index - 1] + self._lengths[self._starts[index - 1]] > page:
            raise AssertionError(f"page {page} is given back twice")
        if index < len(self._starts):
            assert self._starts[index] != page, f"page {page} is given back twice"
            if self._starts[index] == page + 1:
                length += self._lengths.pop(self._starts.pop(index))
        if index > 0 and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == page:
            start = self._starts.pop(index - 1)
            length += self._lengths.pop(start)
        self._insert(start, length)
        self.count += 1

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length


class BlockPool:
    """KV blocks: [num_blocks, block_floats], a block = [layers, 2, V, block_tokens, D], MTP's layers last. Block 0 is the sink."""

    def __init__(self, dims: ModelDims, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.block_tokens = block_tokens
        self._parts = block_parts(dims, block_tokens, dtype)
        self._shape = (num_blocks, dims.num_kv_layers, 2, dims.kv_heads, block_tokens, dims.head_dim)
        # Zeroed pages cost nothing until they are touched; no result may depend on what a free page holds.
        self.tensor = torch.zeros(num_blocks, prod(self._shape[1:]), dtype=dtype)
        self.num_pages = num_blocks
        self._free = FreeRuns(SINK + 1, num_blocks - 1)

    @property
    def num_free(self) -> int:
        return self._free.count

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold positions [0, num_tokens)."""
        return -(-num_tokens // self.block_tokens)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Precondition: count <= num_free. The caller owns them until ``give``."""
        return self._free.take(count, after)

    def give(self, blocks: Iterable[int]) -> None:
        self._free.give(blocks)

    def free_ids(self) -> list[int]:
        return self._free.ids()

    def view(self, layer: int) -> Tensor:
        return self.tensor.view(self._shape)[:, layer]

    def region(self) -> Region:
        return _region("blocks", self.tensor, self._parts)


class StatePool:
    """State slots: [num_slots, slot_floats], a slot = [conv.0 | ssm.0 | conv.1 | ... | hidden] and a tag. Slot 0 is the sink.

    conv window, matrix state and hidden tail of a slot are one unit: one tag says which position all of them hold
    (invariants 1 and 7). The code that writes a slot's state writes its tag; None means that it holds nothing true.
    """

    def __init__(self, dims: ModelDims, num_slots: int, dtype: torch.dtype) -> None:
        self._dims = dims
        self._parts = slot_parts(dims, dtype)
        self.tensor = torch.zeros(num_slots, sum(prod(part.shape) for part in self._parts), dtype=dtype)
        self.num_pages = num_slots
        self.tags: list[int | None] = [None] * num_slots
        self._free = FreeRuns(SINK + 1, num_slots - 1)
        self.hidden = self._view("hidden")
        """[S, d] strided over S: the hidden tails."""

    @property
    def num_free(self) -> int:
        return self._free.count

    def take(self, count: int) -> list[int]:
        """Precondition: count <= num_free. The slots hold nothing: their tags are None."""
        return self._free.take(count)

    def give(self, slots: Iterable[int]) -> None:
        slots = tuple(slots)
        for slot in slots:
            self.tags[slot] = None
        self._free.give(slots)

    def free_ids(self) -> list[int]:
        return self._free.ids()

    def audit(self, slot: int, position: int, purpose: str) -> None:
        """Raises StateAuditError unless ``slot`` truly holds h(position) (invariant 2)."""
        if self.tags[slot] != position:
            raise StateAuditError(f"{purpose}: slot {slot} is claimed to hold h({position}) but its tag is {self.tags[slot]}")

    def conv(self, layer: int) -> Tensor:
        return self._view(f"conv.{layer}")

    def ssm(self, layer: int) -> Tensor:
        return self._view(f"ssm.{layer}")

    def region(self) -> Region:
        return _region("slots", self.tensor, self._parts)

    def _view(self, name: str) -> Tensor:
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

    def check_integrity(self, owned_blocks: Sequence[Sequence[int]], owned_slots: Sequence[Sequence[int]]) -> None:
        """Every page is the sink, free, or owned once; free slots carry no tag. Raises AssertionError that says what isn't so."""
        _check_pages("block", self.blocks.num_pages, self.blocks.free_ids(), owned_blocks)
        _check_pages("slot", self.slots.num_pages, self.slots.free_ids(), owned_slots)
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


def _check_pages(what: str, num_pages: int, free: Sequence[int], owned: Sequence[Sequence[int]]) -> None:
    seen: dict[int, str] = {SINK: "the sink"}
    for owner, pages in (("free", free), *((f"owner {index}", pages) for index, pages in enumerate(owned))):
        for page in pages:
            assert 0 <= page < num_pages, f"{what} {page} ({owner}) is outside the pool of {num_pages}"
            assert page not in seen, f"{what} {page} is both {seen.get(page)} and {owner}"
            seen[page] = owner
    lost = sorted(set(range(num_pages)) - seen.keys())
    assert not lost, f"{what}s {lost} are lost: neither free nor owned"
