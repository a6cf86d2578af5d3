"""What the cache had no room for comes back from files, after a restart too; what is wrong with a file costs time and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import snapshot_files
from engine.core import EngineCore
from engine.policies import Policies
from engine.request import EngineRequest
from tests.cache.cache_kit import ROOMY, cached, expected, family, one_by_one
from tests.engine.engine_kit import Drive, MakeCore, key, prompt, request
from tests.reproductions.column_publishing import BELIEVED, REFUSED
from tests.reproductions.padded_tail import ZEROS

TURNS = (0, 1, 2)


def turns(life: str) -> list[EngineRequest]:
    return [request(f"{life}-{number}", tokens, max_tokens=4) for number, tokens in enumerate(family(37, (9, 5, 20)))]


def live(make_core: MakeCore, folder: Path, life: str, **config: Any) -> tuple[EngineCore, list[list[int]], list[int]]:
    """A process: it answers, says what its cache saved, and leaves in good order."""
    core = make_core(**(ROOMY | {"speculation": 3, "snapshot_dir": folder} | config))
    drive = Drive(core)
    outputs = one_by_one(drive, turns(life))
    saved = [cached(drive, f"{life}-{number}") for number in TURNS]
    core.close()
    return core, outputs, saved


def test_after_a_restart_the_first_request_already_hits(make_core: MakeCore, tmp_path: Path) -> None:
    _, outputs, saved = live(make_core, tmp_path, "first")
    assert saved[0] == 0
    assert outputs == expected(make_core, turns("first"))
    _, again, warm = live(make_core, tmp_path, "second")
    assert again == outputs
    assert warm == [len(each.token_ids) - 1 for each in turns("second")], "the whole prompts, but for their last tokens"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("kind", ["block", "snapshot"])
def test_damaged_files_are_counted_and_their_tokens_computed(
    make_core: MakeCore, tmp_path: Path, damage: Callable[[Path], None], kind: str
) -> None:
    _, outputs, _ = live(make_core, tmp_path, "first")
    for file in tmp_path.rglob(f"{kind}-*.page"):
        damage(file)
    core, again, saved = live(make_core, tmp_path, "second")
    assert again == outputs
    assert saved[0] == 0
    assert core.audit.total == 0


def test_damage_is_counted_while_the_worker_lives(make_core: MakeCore, tmp_path: Path) -> None:
    live(make_core, tmp_path, "first")
    for file in tmp_path.rglob("snapshot-*.page"):
        flip(file)
    core = make_core(**(ROOMY | {"snapshot_dir": tmp_path}))
    one_by_one(Drive(core), turns("second"))
    assert core.counters()["baton_tier_corrupt_pages_total"] >= 1
    core.close()


def test_a_worker_outlives_bad_files_that_cannot_be_removed(make_core: MakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, outputs, _ = live(make_core, tmp_path, "first")
    for file in tmp_path.rglob("*.page"):
        flip(file)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for function in ("unlink", "utime", "rename", "replace"):
        monkeypatch.setattr(os, function, refused)
    core, again, _ = live(make_core, tmp_path, "second")
    assert again == outputs
    core.flush_cache()


def test_who_leaves_in_good_order_leaves_all_that_the_cache_holds(
    make_core: MakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a queue for the disk that holds hardly a state, and a disk that is slow."""
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", 1000)
    replace = os.replace

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.001)
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", slow)
    _, outputs, _ = live(make_core, tmp_path, "first")
    _, again, saved = live(make_core, tmp_path, "second")
    assert again == outputs
    assert saved == [len(each.token_ids) - 1 for each in turns("second")]


def test_what_was_evicted_comes_back_in_the_same_life(make_core: MakeCore, tmp_path: Path) -> None:
    core = make_core(**(ROOMY | {"snapshot_dir": tmp_path, "snapshot_slots": 1}))
    drive = Drive(core)
    first = prompt(40, seed=1)
    one_by_one(drive, [request("first", first, max_tokens=1)])
    one_by_one(drive, [request(f"other-{n}", prompt(90, seed=n), max_tokens=1) for n in (2, 3)])
    assert core.counters()["baton_cache_evicted_snapshots_total"] > 0
    core.close()  # waits for the writer
    core = make_core(**(ROOMY | {"snapshot_dir": tmp_path, "snapshot_slots": 1}))
    again = Drive(core)
    assert one_by_one(again, [request("again", first, max_tokens=1)]) == [drive.told[key("first")].tokens]
    assert cached(again, "again") > 0
    core.close()


def test_a_lie_is_never_written(make_core: MakeCore, tmp_path: Path) -> None:
    core = with_policies(make_core, tmp_path, REFUSED)
    for name, length in (("first", 30), ("second", 27)):
        core.submit(request(name, prompt(length, seed=length), origin="seal"))
    Drive(core).run()
    assert core.audit.total == 1
    core.close()
    names = [file.name for file in tmp_path.rglob("snapshot-*")]
    assert not [name for name in names if name.endswith("-16.page")]
    assert names


@pytest.mark.parametrize("policies", [BELIEVED, ZEROS])
def test_faults_that_would_outlive_their_policies_in_files_are_refused(make_core: MakeCore, tmp_path: Path, policies: Policies) -> None:
    with pytest.raises(ValueError, match=r"snapshot_dir=.*policies that don't enforce_tags"):
        with_policies(make_core, tmp_path, policies)


def with_policies(make_core: MakeCore, folder: Path, policies: Policies) -> EngineCore:
    base = make_core(block_tokens=4, snapshot_tokens=16, kv_blocks=100, step_tokens=40, max_prefill_chunk=40, snapshot_dir=folder)
    base.close()
    return EngineCore(base.config, base.loaded, policies)


def test_a_directory_that_cannot_be_used_is_named(make_core: MakeCore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="snapshot_dir="):
        make_core(snapshot_dir=tmp_path / "file" / "inside")
