"""The benchmark and the self test run, and what they say has the right shape. Their figures are nobody's test."""

from __future__ import annotations

import itertools
import json

import pytest

from transfer.bench import bench, find_perftest, perftest, selftest
from transfer.bench_peer import Sizes

SMALL = Sizes(block_bytes=10_000, num_blocks=20, slot_bytes=700_000)


async def test_the_benchmark_measures_all_of_them() -> None:
    result = await bench(SMALL, runs=1)
    assert result["bytes"] == 900_000
    assert set(result["figures"]) == {"handoff", "raw_socket", "perftest_default", "perftest_our_settings"}
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in result["figures"].values())
    assert set(result["handoff_over"]) == {"raw_socket", "perftest_default", "perftest_our_settings"}
    json.dumps(result)


async def test_the_self_test_names_both_figures() -> None:
    report = await selftest(runs=1)
    assert report.ucx > 0
    assert report.socket > 0
    assert (report.warning is None) == (report.ratio >= 0.5)


def test_perftest_is_the_one_of_our_ucx() -> None:
    assert find_perftest() is not None
    assert perftest(1 << 20, 20, {}) > 0


@pytest.mark.parametrize("run_blocks", [1, 4, 100])
def test_blocks_lie_in_runs(run_blocks: int) -> None:
    sizes = Sizes(num_blocks=26, run_blocks=run_blocks)
    blocks = sizes.place(seed=3)
    assert sorted(blocks) == list(range(1, 27))
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(blocks))
    assert breaks <= -(-26 // run_blocks) - 1
