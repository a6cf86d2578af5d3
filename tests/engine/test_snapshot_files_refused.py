"""What a disk refuses costs pages and nothing else: neither thread ends, nothing is tried for ever, one line tells of many."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from engine.seldom import Seldom
from tests.engine.page_kit import FINGERPRINT, PAGE, name, opened, put, read


def refuse(monkeypatch: pytest.MonkeyPatch, *functions: str) -> None:
    """As another user's files do, or a mount that is read-only; the tests may run as root, whom no mode stops."""

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for function in functions:
        monkeypatch.setattr(os, function, refused)


def spoil(folder: Path) -> None:
    for file in folder.rglob("*.page"):
        file.write_bytes(b"nonsense")


def test_a_page_is_good_though_its_age_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, name(1))
    refuse(monkeypatch, "utime", "unlink")
    with opened(tmp_path) as files:
        assert read(files, name(1)) == PAGE
        assert files.counts()["corrupt"] == 0


def test_a_bad_file_that_cannot_be_removed_is_forgotten_for_this_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, *map(name, range(5)))
    spoil(tmp_path)
    refuse(monkeypatch, "unlink")
    with opened(tmp_path) as files:
        for number in range(5):
            assert read(files, name(number)) is None
        counts = files.counts()
        assert (counts["corrupt"], counts["stuck"]) == (5, 5)
        assert len(files) == files.num_bytes == 0
    assert len([record for record in caplog.records if "can't remove" in record.message]) == 1


def test_a_bound_that_cannot_be_kept_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, *map(name, range(3)))
    refuse(monkeypatch, "unlink")
    with opened(tmp_path, max_bytes=0) as files:
        assert len(files) == 0
        assert files.counts()["stuck"] == 3
        files.put(name(9), memoryview(PAGE))
    assert files.counts()["written"] == 1
    assert files.counts()["stuck"] == 4


def test_the_writer_outlives_what_it_cannot_remove(tmp_path: Path) -> None:
    put(tmp_path, name(1), name(2))
    size = next(tmp_path.rglob("*.page")).stat().st_size
    with opened(tmp_path, max_bytes=2 * size) as files:
        become_a_folder(tmp_path / FINGERPRINT.hex() / name(1).file)  # the oldest
        files.put(name(3), memoryview(PAGE))
        files.put(name(4), memoryview(PAGE))
        files.close()
        assert files.counts()["written"] == 2
        assert files.counts()["stuck"] == 1


def test_a_flush_outlives_what_it_cannot_remove(tmp_path: Path) -> None:
    put(tmp_path, name(1), name(2))
    with opened(tmp_path) as files:
        become_a_folder(tmp_path / FINGERPRINT.hex() / name(1).file)
        files.clear()
        files.put(name(3), memoryview(PAGE))
    assert files.counts()["stuck"] == 1
    with opened(tmp_path) as files:
        assert files.names() == [name(3)]


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def test_what_cannot_be_forgotten_on_disk_is_not_found_in_this_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, name(1))
    refuse(monkeypatch, "rename", "unlink", "replace")
    with opened(tmp_path) as files:
        files.clear()
        assert read(files, name(1)) is None
        files.put(name(2), memoryview(PAGE))
    counts = files.counts()
    assert (counts["stuck"], counts["failed"]) == (1, 1)


def test_a_file_that_cannot_be_read_is_not_called_corrupt_nor_removed(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    with opened(tmp_path) as files:
        path = tmp_path / FINGERPRINT.hex() / name(1).file
        become_a_folder(path)
        assert read(files, name(1)) is None
        assert not files.has(name(1))
        counts = files.counts()
        assert (counts["unreadable"], counts["corrupt"]) == (1, 0)
    assert path.exists()


def test_of_many_warnings_one_is_told_and_how_many_there_were(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warnings = Seldom(logging.getLogger("baton.test"), every_s=60)
    for number in range(3):
        warnings.warning("write", f"can't write {number}")
    warnings.warning("read", "can't read")
    now += 60
    warnings.warning("write", "can't write 3")
    assert [record.message for record in caplog.records] == ["can't write 0", "can't read", "can't write 3 (and 2 like it before)"]
