"""Pages in files: they come back whole after a restart, or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.engine.page_kit import FINGERPRINT, PAGE, name, opened, put, read


def the_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.page")
    return file


def test_a_page_comes_back_after_a_restart(tmp_path: Path) -> None:
    put(tmp_path, name(1), name(1, "block", 336), name(2))
    with opened(tmp_path) as files:
        assert len(files) == 3
        assert files.has(name(1))
        assert read(files, name(1)) == read(files, name(1, "block", 336)) == PAGE
        assert files.counts()["read"] == 2
        assert not files.has(name(3))
        assert read(files, name(3)) is None
        assert not files.has(name(1, position=332))  # the same tokens hash otherwise; the position is said again all the same


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


@pytest.mark.parametrize("offset", [0, 11, 12, 13, 29, 61, 69, 77, 85, -1])
def test_a_flipped_bit_anywhere_is_found_and_counted(tmp_path: Path, offset: int) -> None:
    put(tmp_path, name(1))
    flip(the_file(tmp_path), offset)
    with opened(tmp_path) as files:
        assert read(files, name(1)) is None
        assert files.counts()["corrupt"] == 1
        assert not files.has(name(1))
        assert files.num_bytes == 0
        assert not list(tmp_path.rglob("*.page"))


@pytest.mark.parametrize("num_bytes", [0, 5, 85, 400])
def test_a_file_that_was_cut_short_is_found_and_counted(tmp_path: Path, num_bytes: int) -> None:
    put(tmp_path, name(1))
    cut(the_file(tmp_path), num_bytes)
    with opened(tmp_path) as files:
        assert read(files, name(1)) is None
        assert files.counts()["corrupt"] == 1


def test_a_file_of_another_page_size_or_name_is_not_taken(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    the_file(tmp_path).rename(the_file(tmp_path).parent / name(2).file)
    with opened(tmp_path) as files:
        assert read(files, name(2)) is None
        files.put(name(2), memoryview(PAGE))
    with opened(tmp_path) as files:
        assert read(files, name(2), len(PAGE) - 1) is None
    put(tmp_path, name(2))
    with opened(tmp_path) as files:
        assert read(files, name(2), len(PAGE) + 1) is None


def test_a_page_may_have_parts(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        files.put(name(1), memoryview(PAGE), memoryview(b"rest"))
    with opened(tmp_path) as files:
        first, second = bytearray(len(PAGE)), bytearray(4)
        assert files.read(name(1), memoryview(first), memoryview(second))
        assert bytes(first + second) == PAGE + b"rest"


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    (the_file(tmp_path).parent / "notes.txt").write_text("mine")
    with opened(tmp_path, max_bytes=0) as files:
        assert len(files) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


def test_another_model_does_not_see_them(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    with opened(tmp_path, fingerprint=bytes(16)) as files:
        assert len(files) == 0
        assert not files.has(name(1))


def test_the_oldest_go_when_there_is_no_room(tmp_path: Path) -> None:
    put(tmp_path, *map(name, range(5)))
    for number in range(5):  # a file system's clock may be too coarse to tell them apart
        os.utime(tmp_path / FINGERPRINT.hex() / name(number).file, (number, number))
    size = next(tmp_path.rglob("*.page")).stat().st_size
    with opened(tmp_path, max_bytes=3 * size) as files:
        assert len(files) == 3
        assert files.num_bytes == 3 * size
        assert read(files, name(2)) == PAGE  # used last now
        files.put(name(9), memoryview(PAGE))
    with opened(tmp_path, max_bytes=3 * size) as files:
        assert [number for number in range(10) if files.has(name(number))] == [2, 4, 9]
        assert len(list(tmp_path.rglob("*.page"))) == 3


def test_a_half_written_file_is_not_seen_and_goes_when_it_is_old(tmp_path: Path) -> None:
    put(tmp_path, name(1))
    partial = the_file(tmp_path).parent / (name(1).file + ".123.partial")
    partial.write_bytes(b"half")
    an_hour_ago = time.time() - 3500  # a disk may be slow, and its writer alive
    os.utime(partial, (an_hour_ago, an_hour_ago))
    with opened(tmp_path) as files:
        assert len(files) == 1
    assert partial.exists()
    os.utime(partial, (0, 0))
    with opened(tmp_path) as files:
        assert len(files) == 1
    assert not partial.exists()


def test_a_full_disk_costs_the_page_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        folder = tmp_path / FINGERPRINT.hex()
        (folder / name(1).file).mkdir()  # can't be replaced by a file
        files.put(name(1), memoryview(PAGE))
        files.put(name(2), memoryview(PAGE))
        files.close()
        assert files.counts()["failed"] == 1
        assert files.has(name(2))
        assert not list(folder.glob("*.partial"))
