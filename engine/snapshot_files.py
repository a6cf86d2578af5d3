"""The second tier of the prefix cache: evicted pages in host files, found again by what their tokens are, after a restart too.

One file per page, written beside its name and renamed into place, so that a reader sees a whole file or none. Its header says
which format, model, layout, kind and position it is for; its checksum covers header and page. Whatever is wrong with a file,
it counts as not there: the tokens are recomputed. Files of another model lie in another folder and are never opened.

Point ``directory`` at a memory file system (/dev/shm) to have the tier in shared memory. Two workers may share a directory: a
name always means the same tokens. Each bounds what it knows of, and knows all at its start.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import xxhash

PageKind = Literal["block", "snapshot"]

FORMAT = 1
_MAGIC = b"baton-page\n"
_HEADER = struct.Struct("<11sBB16s32sQQQ")
"""magic, format, kind, fingerprint, digest, position, bytes that follow, xxh3-64 of all that and them."""
_KINDS: dict[PageKind, int] = {"block": 1, "snapshot": 2}
_SUFFIX = ".page"
_FILE = re.compile(rf"(block|snapshot)-((?:[0-9a-f]{{2}}){{1,32}})-(\d{{1,18}}){re.escape(_SUFFIX)}")
_PARTIAL = ".partial"
_ABANDONED_S = 60.0
"""A file that is being written isn't older."""
MAX_QUEUED_BYTES = 256 << 20
"""Copies of pages that wait to be written; more are not kept."""

log = logging.getLogger("baton.cache")


@dataclass(frozen=True, slots=True)
class PageName:
    kind: PageKind
    digest: bytes
    """Of the salt and the tokens before ``position``; at most 32 bytes."""
    position: int
    """A block's end; the position whose state a snapshot holds."""

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.digest.hex()}-{self.position}{_SUFFIX}"

    @staticmethod
    def of(file: str) -> PageName | None:
        """None for a file that isn't named by us."""
        match = _FILE.fullmatch(file)
        return PageName("block" if match[1] == "block" else "snapshot", bytes.fromhex(match[2]), int(match[3])) if match else None


@dataclass(frozen=True, slots=True)
class _Write:
    name: PageName
    parts: list[bytes]


@dataclass(frozen=True, slots=True)
class _Removal:
    names: list[PageName]


class SnapshotFiles:
    """Pages in, pages out. ``put`` never waits for a disk; ``read`` reads one file."""

    def __init__(self, directory: Path, fingerprint: bytes, max_bytes: int) -> None:
        """``fingerprint``: 16 bytes, of everything that decides what a page's bytes mean. Raises OSError when the directory can't be made.

        The oldest files go when there are more than ``max_bytes``, and what a process left half-written when it died.
        """
        self._folder = directory / fingerprint.hex()
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[PageName, int] = OrderedDict()  # by age of use, oldest first
        self._num_bytes = 0
        self._queued: dict[PageName, int] = {}
        self._counts: Counter[str] = Counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._scan()
        self._queue: SimpleQueue[_Write | _Removal | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="snapshot-files", daemon=True)
        self._writer.start()

    # --- the cache's doors

    def put(self, name: PageName, *parts: memoryview) -> None:
        """Keep a copy of ``parts``. It is in a file a little later, or nowhere when the disk can't keep up."""
        size = sum(part.nbytes for part in parts)
        with self._lock:
            if name in self._queued:
                return
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return
            if sum(self._queued.values()) + size > MAX_QUEUED_BYTES:
                self._counts["dropped"] += 1
                return
            self._queued[name] = size
        self._queue.put(_Write(name, [bytes(part) for part in parts]))

    def has(self, name: PageName) -> bool:
        """As far as is known without looking at the disk."""
        with self._lock:
            return name in self._sizes

    def names(self) -> list[PageName]:
        with self._lock:
            return list(self._sizes)

    def read(self, name: PageName, *into: memoryview) -> bool:
        """Fill ``into`` with what was put. False when it isn't there, or isn't what its name says: then it is counted and removed,
        and ``into`` holds nothing that may be used."""
        with self._lock:
            if name not in self._sizes:
                return False
            self._sizes.move_to_end(name)
        path = self._folder / name.file
        try:
            wrong = self._read_checked(path, name, into)
            if wrong is None:
                os.utime(path)  # its age, for the next process
        except OSError as error:
            wrong = error.strerror or str(error)
        if wrong is not None:
            log.warning("ignored %s: %s", path.name, wrong)
            self._remove(name)
        with self._lock:
            self._counts["read" if wrong is None else "corrupt"] += 1
        return wrong is None

    def counts(self) -> dict[str, int]:
        """written, read, corrupt (ignored for what was wrong with them), dropped (the disk couldn't keep up), failed (to be written),
        removed (for room)."""
        with self._lock:
            return {key: self._counts[key] for key in ("written", "read", "corrupt", "dropped", "failed", "removed")}

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._num_bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes)

    def clear(self) -> None:
        """Forget all files, and what waits to be written. The writer removes them."""
        with self._lock:
            names = list(self._sizes)
            self._sizes.clear()
            self._queued.clear()
            self._num_bytes = 0
        self._queue.put(_Removal(names))

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what was put so far, then end. May be called again. What isn't written in time is lost, and nothing else."""
        self._queue.put(None)
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.warning("gave up writing %d pages", len(self._queued))

    # --- files

    def _scan(self) -> None:
        found: list[tuple[float, PageName, int]] = []
        for entry in os.scandir(self._folder):
            name, told = PageName.of(entry.name), entry.stat()
            if name is not None:
                found.append((told.st_mtime, name, told.st_size))
            elif entry.name.endswith(_PARTIAL) and time.time() - told.st_mtime > _ABANDONED_S:
                os.unlink(entry.path)
        for _, name, size in sorted(found, key=lambda each: each[0]):
            self._sizes[name] = size
            self._num_bytes += size
        self._make_room()

    def _read_checked(self, path: Path, name: PageName, into: Sequence[memoryview]) -> str | None:
        """None, or what is wrong."""
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            num_read = sum(file.readinto(part) for part in into)
            longer = file.read(1)
        if len(header) < _HEADER.size or num_read < sum(part.nbytes for part in into):
            return "cut short"
        if longer:
            return "too long"
        expected = self._header(name, into)
        return None if header == expected else _difference(header, expected)

    def _header(self, name: PageName, parts: Sequence[memoryview | bytes]) -> bytes:
        size = sum(len(part) for part in parts)

        def pack(checksum: int) -> bytes:
            return _HEADER.pack(_MAGIC, FORMAT, _KINDS[name.kind], self._fingerprint, name.digest, name.position, size, checksum)

        hasher = xxhash.xxh3_64(pack(0))
        for part in parts:
            hasher.update(part)
        return pack(hasher.intdigest())

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, _Removal):
                for name in job.names:
                    if not self.has(name):  # nobody has put it again
                        (self._folder / name.file).unlink(missing_ok=True)
            elif job.name in self._queued:  # not cleared meanwhile
                self._count_write(job.name, self._try_write(job.name, job.parts))

    def _try_write(self, name: PageName, parts: Sequence[bytes]) -> bool:
        try:
            self._write(name, parts)
        except OSError as error:
            log.warning("can't write %s: %s", name.file, error.strerror)
            return False
        return True

    def _count_write(self, name: PageName, written: bool) -> None:
        with self._lock:
            self._counts["written" if written else "failed"] += 1
            self._queued.pop(name, None)

    def _write(self, name: PageName, parts: Sequence[bytes]) -> None:
        path = self._folder / name.file
        partial = self._folder / f"{name.file}.{os.getpid()}{_PARTIAL}"
        try:
            with partial.open("wb") as file:
                file.writelines([self._header(name, parts), *parts])
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        size = _HEADER.size + sum(map(len, parts))
        with self._lock:
            forgotten = name not in self._queued
            if not forgotten:
                self._num_bytes += size - self._sizes.pop(name, 0)
                self._sizes[name] = size
        if forgotten:
            path.unlink(missing_ok=True)
        self._make_room()

    def _make_room(self) -> None:
        while True:
            with self._lock:
                if self._num_bytes <= self._max_bytes:
                    return
                oldest = next(iter(self._sizes))
                self._counts["removed"] += 1
            self._remove(oldest)

    def _remove(self, name: PageName) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)
        (self._folder / name.file).unlink(missing_ok=True)


def _difference(header: bytes, expected: bytes) -> str:
    fields = ("magic", "format", "kind", "fingerprint", "digest", "position", "size", "checksum")
    pairs = zip(fields, _HEADER.unpack(header), _HEADER.unpack(expected), strict=True)
    return f"another {next(field for field, found, wanted in pairs if found != wanted)}"
