"""Workers share a directory: one starts, writes, forgets or dies beside another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.page_kit import FINGERPRINT, PAGE, name, opened, put, read


def test_links_and_folders_of_any_name_stop_no_start(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    folder = tmp_path / FINGERPRINT.hex()
    (folder / "x").symlink_to("/nowhere")
    (folder / name(2).file).symlink_to("/nowhere")
    (folder / f"{name(3).file}.ab.partial").symlink_to("/nowhere")
    (folder / name(4).file).mkdir()
    with opened(tmp_path) as files:
        assert files.names() == [name(1)]


class Vanishing:
    """What os.scandir has found, when the files have gone."""

    def __init__(self, path: Path) -> None:
        with SCANDIR(path) as entries:
            self._entries = list(entries)

    def __enter__(self) -> Vanishing:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        for entry in self._entries:
            if entry.is_file():
                os.unlink(entry.path)
        yield from self._entries


SCANDIR = os.scandir


def test_what_goes_while_a_worker_starts_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, name(1))
    (tmp_path / FINGERPRINT.hex() / f"{name(2).file}.ab.partial").write_bytes(b"half")
    monkeypatch.setattr(os, "scandir", Vanishing)
    with opened(tmp_path) as files:
        assert len(files) == 0


def test_two_write_the_same_page_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one process: as little do the ids of processes in two containers differ."""
    replace, both = os.replace, threading.Barrier(2)

    def replace_together(*args: Any, **kwargs: Any) -> None:
        both.wait(10)
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", replace_together)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.put(name(1), memoryview(PAGE))
        second.put(name(1), memoryview(PAGE))
    assert first.counts()["failed"] == second.counts()["failed"] == 0
    with opened(tmp_path) as files:
        assert read(files, name(1)) == PAGE


def test_a_flush_forgets_what_others_have_written(tmp_path: Path) -> None:
    with opened(tmp_path) as flushed:
        put(tmp_path, name(1))
        assert not flushed.has(name(1))
        flushed.clear()
        with opened(tmp_path) as files:
            assert len(files) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_other_worker_goes_on_after_a_flush(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    with opened(tmp_path) as flushed, opened(tmp_path) as other:
        flushed.clear()
        assert read(other, name(1)) is None
        assert not other.has(name(1))
        counts = other.counts()
        assert (counts["gone"], counts["corrupt"]) == (1, 0)
        other.put(name(2), memoryview(PAGE))
        other.close()
        flushed.clear()
        flushed.clear()  # nothing is there
    with opened(tmp_path) as files:
        assert len(files) == 0


def test_what_the_other_writes_after_a_flush_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as flushed, opened(tmp_path) as other:
        flushed.clear()
        other.put(name(2), memoryview(PAGE))
    with opened(tmp_path) as files:
        assert read(files, name(2)) == PAGE


def test_a_flush_holds_though_its_worker_dies_before_the_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, name(1))
    replace, waiting, gate = os.replace, threading.Event(), threading.Event()

    def hang(*args: Any, **kwargs: Any) -> None:
        waiting.set()
        gate.wait(10)
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", hang)
    with opened(tmp_path) as dying:
        dying.put(name(2), memoryview(PAGE))
        assert waiting.wait(10)
        dying.clear()
        assert list(tmp_path.rglob("*.page")), "the writer hangs: nothing is removed"
        with opened(tmp_path) as files:  # the next life
            assert len(files) == 0
        assert not list(tmp_path.rglob("*.page")), "it has removed what it found set aside"
        gate.set()
    with opened(tmp_path) as files:
        assert len(files) == 0, "what was being written at the flush went with the rest"


def test_a_flush_removes_nothing_that_is_not_ours(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    (tmp_path / FINGERPRINT.hex() / "notes.txt").write_text("mine")
    with opened(tmp_path) as files:
        files.clear()
    put(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]
