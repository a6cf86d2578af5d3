"""Prefixes in files: the deepest one is found by its tokens, and comes back byte for byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.file_tier import FileTier, open_file_tier
from engine.models.info import ModelInfo
from engine.models.nemotron_h import model_dims
from engine.models.nemotron_h_config import parse_config
from engine.pools import Pools
from engine.prefix_cache.nodes import Salt
from engine.prefix_cache.tier import TierEntry
from tests.engine.engine_kit import MODEL, VOCAB, prompt

BLOCK = 4
SALT = Salt("weights", None, "float32", None)
INFO = ModelInfo(
    model_type="nemotron_h", config_digest="c", weights_digest="w", vocab_size=VOCAB, max_model_len=128, eos_token_ids=(1,), has_mtp=True,
    dtype="float32",
)  # fmt: skip


@pytest.fixture
def pools() -> Pools:
    """Every page holds something of its own."""
    made = Pools(model_dims(parse_config(MODEL), with_mtp=True), num_blocks=40, num_slots=8, block_tokens=BLOCK, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    made.blocks.tensor.copy_(torch.randn(made.blocks.tensor.shape, generator=generator))
    made.slots.tensor.copy_(torch.randn(made.slots.tensor.shape, generator=generator))
    return made


@pytest.fixture
def tier(pools: Pools, tmp_path: Path) -> Iterator[FileTier]:
    made = open_file_tier(tmp_path, 1 << 24, INFO, pools)
    yield made
    made.close()


def entry(tokens: Sequence[int], blocks: Sequence[int], slot: int, salt: Salt = SALT) -> TierEntry:
    return TierEntry(salt=salt, tokens=tuple(tokens), position=len(tokens), blocks=tuple(blocks), slot=slot)


def reopened(tier: FileTier, pools: Pools, folder: Path, info: ModelInfo = INFO) -> FileTier:
    tier.close()
    return open_file_tier(folder, 1 << 24, info, pools)


def position(tier: FileTier, tokens: Sequence[int], beyond: int, limit: int, salt: Salt = SALT) -> int | None:
    found = tier.find(salt, tokens, beyond, limit)
    return found.position if found is not None else None


def test_a_prefix_comes_back_byte_for_byte_after_a_restart(tier: FileTier, pools: Pools, tmp_path: Path) -> None:
    tokens = prompt(20)
    tier.spill(entry(tokens[:11], [3, 4, 5], slot=2))
    tier = reopened(tier, pools, tmp_path)
    found = tier.find(SALT, tokens, 0, 19)
    assert found is not None
    assert found.position == 11
    assert found.load(0, [20, 21, 22], 7)
    assert torch.equal(pools.blocks.tensor[[20, 21, 22]], pools.blocks.tensor[[3, 4, 5]])
    assert torch.equal(pools.slots.tensor[7], pools.slots.tensor[2])
    before = pools.blocks.tensor[30].clone()
    assert found.load(1, [31, 32], 6), "the first block is in the tree already"
    assert torch.equal(pools.blocks.tensor[[31, 32]], pools.blocks.tensor[[4, 5]])
    assert torch.equal(pools.blocks.tensor[30], before)
    tier.close()


def test_a_full_block_that_the_tree_has_takes_the_place_of_the_partly_filled_one(tier: FileTier, pools: Pools, tmp_path: Path) -> None:
    tokens = prompt(20)
    tier.spill(entry(tokens[:11], [3, 4, 5], slot=2))
    tier = reopened(tier, pools, tmp_path)
    found = tier.find(SALT, tokens, 8, 19)
    assert found is not None
    assert found.load(3, [], 7)
    assert torch.equal(pools.slots.tensor[7], pools.slots.tensor[2])
    tier.close()


def test_what_is_forgotten_is_gone_after_a_restart_too(tier: FileTier, pools: Pools, tmp_path: Path) -> None:
    tokens = prompt(20)
    tier.spill(entry(tokens[:11], [3, 4, 5], slot=2))
    tier.clear()
    assert position(tier, tokens, 0, 19) is None
    tier.spill(entry(tokens[:6], [3, 4], slot=2))
    tier = reopened(tier, pools, tmp_path)
    assert position(tier, tokens, 0, 19) == 6
    tier.clear()
    tier.close()
    assert not list(tmp_path.rglob("*.page"))


def test_the_deepest_within_the_bounds_is_found(tier: FileTier, pools: Pools, tmp_path: Path) -> None:
    tokens = prompt(40)
    for number, end in enumerate((3, 8, 11, 16)):
        tier.spill(entry(tokens[:end], range(1, 1 + -(-end // BLOCK)), slot=1 + number))
    tier = reopened(tier, pools, tmp_path)
    assert position(tier, tokens, 0, 39) == 16
    assert position(tier, tokens, 0, 15) == 11
    assert position(tier, tokens, 11, 15) is None
    assert position(tier, tokens, 0, 7) == 3
    assert position(tier, (*tokens[:10], 0, *tokens[11:]), 0, 39) == 8
    assert position(tier, prompt(40, seed=1), 0, 39) is None
    assert position(tier, tokens, 0, 39, Salt("weights", None, "float32", "mine")) is None
    tier.close()


def test_a_prefix_without_its_kv_is_not_found_unless_the_tree_has_it(tier: FileTier, pools: Pools, tmp_path: Path) -> None:
    tokens = prompt(40)
    tier.spill(entry(tokens[:18], range(1, 6), slot=1))
    tier.close()
    min(tmp_path.rglob("block-*-4.page")).unlink()
    tier = open_file_tier(tmp_path, 1 << 24, INFO, pools)
    assert position(tier, tokens, 0, 39) is None
    assert position(tier, tokens, 4, 39) == 18
    tier.close()


@pytest.mark.parametrize("kind", ["block", "snapshot"])
def test_a_damaged_file_is_no_hit_the_next_time_and_is_counted(tier: FileTier, pools: Pools, tmp_path: Path, kind: str) -> None:
    tokens = prompt(40)
    tier.spill(entry(tokens[:10], [1, 2, 3], slot=1))
    tier.close()
    file = min(tmp_path.rglob(f"{kind}-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    tier = open_file_tier(tmp_path, 1 << 24, INFO, pools)
    found = tier.find(SALT, tokens, 0, 39)
    assert found is not None
    assert not found.load(0, [20, 21, 22], 7)
    assert position(tier, tokens, 0, 39) is None
    assert tier.counters()["baton_tier_corrupt_pages_total"] == 1
    tier.close()


@pytest.mark.parametrize("field", ["weights_digest", "config_digest", "dtype", "has_mtp"])
def test_files_of_another_model_are_foreign(tier: FileTier, pools: Pools, tmp_path: Path, field: str) -> None:
    tokens = prompt(40)
    tier.spill(entry(tokens[:8], [1, 2], slot=1))
    tier = reopened(tier, pools, tmp_path, dataclasses.replace(INFO, **{field: "other"}))  # type: ignore[arg-type]
    assert position(tier, tokens, 0, 39) is None
    tier.close()
