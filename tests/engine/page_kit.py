"""Pages for tests of their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.page_file import PageName
from engine.snapshot_files import SnapshotFiles

FINGERPRINT = bytes(range(16))
PAGE = bytes(range(256)) * 4


def name(number: int, kind: str = "snapshot", position: int = 331) -> PageName:
    return PageName(kind, number.to_bytes(32, "big"), position)  # type: ignore[arg-type]


@contextmanager
def opened(folder: Path, fingerprint: bytes = FINGERPRINT, max_bytes: int = 1 << 20) -> Iterator[SnapshotFiles]:
    files = SnapshotFiles(folder, fingerprint, max_bytes)
    try:
        yield files
    finally:
        files.close()


def put(folder: Path, *names: PageName, **how: int) -> None:
    """One process's life: its pages are in files at its end."""
    with opened(folder, **how) as files:  # type: ignore[arg-type]
        for each in names:
            files.put(each, memoryview(PAGE))


def read(files: SnapshotFiles, wanted: PageName, num_bytes: int = len(PAGE)) -> bytes | None:
    into = bytearray(num_bytes)
    return bytes(into) if files.read(wanted, memoryview(into)) else None
