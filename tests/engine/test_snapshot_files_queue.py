"""Pages wait for the disk: what is written is what was put last, who leaves waits, and waiting pages cost nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import snapshot_files
from engine.snapshot_files import SnapshotFiles
from tests.engine.page_kit import FINGERPRINT, PAGE, name, opened, put, read


@contextmanager
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file gets its name before the event is set, at the latest at the end."""
    replace, gate = os.replace, threading.Event()

    def hang(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(10)
        replace(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", hang)
        try:
            yield gate
        finally:
            gate.set()


@pytest.mark.parametrize("ahead", [(), (name(1),)], ids=["being written", "waiting"])
def test_what_was_put_after_a_flush_is_written_not_what_was_put_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: tuple[Any, ...]
) -> None:
    with hanging_disk(monkeypatch) as gate, opened(tmp_path) as files:
        for each in ahead:
            files.put(each, memoryview(PAGE))
        files.put(name(2), memoryview(b"old bytes"))
        files.clear()
        files.put(name(2), memoryview(b"new bytes"))
        gate.set()
    assert files.counts()["written"] == 1
    with opened(tmp_path) as files:
        assert read(files, name(2), 9) == b"new bytes"


def test_who_leaves_waits_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", 3 * len(PAGE))
    with hanging_disk(monkeypatch) as gate, opened(tmp_path) as files:
        for number in range(4):
            files.put(name(number), memoryview(PAGE))
        assert files.counts()["dropped"] == 1, "in the midst of life nobody waits"
        files.leave()
        gate.set()
        for number in range(4, 30):
            files.put(name(number), memoryview(PAGE))
    assert files.counts()["dropped"] == 1
    with opened(tmp_path) as files:
        assert [number for number in range(30) if read(files, name(number)) is not None] == [0, 1, 2, *range(4, 30)]


def test_a_page_that_is_larger_than_the_queue_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", len(PAGE) - 1)
    put(tmp_path, name(1))
    with opened(tmp_path) as files:
        assert read(files, name(1)) == PAGE


def test_who_leaves_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "MAX_QUEUED_BYTES", len(PAGE))
    with hanging_disk(monkeypatch):
        files = SnapshotFiles(tmp_path, FINGERPRINT, 1 << 20)
        files.leave(timeout_s=0.1)
        for number in range(3):
            files.put(name(number), memoryview(PAGE))
        files.close()
        assert files.counts()["dropped"] == 2
        assert files.counts()["written"] == 0


def test_a_put_costs_the_same_however_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of this thread; a sum over all that wait would take a hundred times as long."""
    numbers = iter(range(100_000))

    def seconds_of_puts() -> float:
        start = time.thread_time()
        for _ in range(50):
            files.put(name(next(numbers)), memoryview(b"page"))
        return time.thread_time() - start

    with hanging_disk(monkeypatch) as gate, opened(tmp_path) as files:
        few = min(seconds_of_puts() for _ in range(5))
        for _ in range(400):
            seconds_of_puts()
        many = min(seconds_of_puts() for _ in range(5))
        files.clear()  # none of them need be written
        gate.set()
    assert many < 10 * few
