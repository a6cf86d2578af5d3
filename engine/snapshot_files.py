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
import struct
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import xxhash

PageKind = Literal["block", "snapshot"]

FORMAT = 1
_MAGIC = b"baton-page\n"
_HEADER = struct.Struct("<11sBB16s16sQQQ")
"""magic, format, kind, fingerprint, digest, position, page bytes, xxh3-64 of all that and the page."""
_KINDS: dict[PageKind, int] = {"block": 1, "snapshot": 2}
_SUFFIX = ".page"
_ABANDONED_S = 60.0
"""A file that is being written isn't older."""
MAX_QUEUED_BYTES = 256 << 20
"""Copies of pages that wait to be written; more are not kept."""

log = logging.getLogger("baton.cache")


@dataclass(frozen=True, slots=True)
class PageName:
    kind: PageKind
    digest: bytes
    """16 bytes: of the salt and the tokens [0, position)."""
    position: int
    """A block's end; the position whose state a snapshot holds."""

    @property
    def file(self) -> str:
        return f"{self.kind[0]}{self.digest.hex()}{self.position:x}{_SUFFIX}"


class SnapshotFiles:
    """Pages in, pages out. ``put`` never waits for a disk; ``read`` reads one file."""

    def __init__(self, directory: Path, fingerprint: bytes, max_bytes: int) -> None:
        """``fingerprint``: 16 bytes, of everything that decides what a page's bytes mean. Raises OSError when the directory can't be made.

        Half-written files of a process that died are removed, and the oldest ones when there are more than ``max_bytes``.
        """
        self._folder = directory / fingerprint.hex()
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by age of use, oldest first
        self._num_bytes = 0
        self._queued_bytes = 0
        self._queued: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._scan()
        self._queue: SimpleQueue[tuple[PageName, bytes] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="snapshot-files", daemon=True)
        self._writer.start()

    # --- the cache's doors

    def put(self, name: PageName, page: memoryview) -> None:
        """Keep a copy of the page. It is in its file a little later, or nowhere when the disk can't keep up."""
        with self._lock:
            if name.file in self._sizes or name.file in self._queued:
                return
            if self._queued_bytes + page.nbytes > MAX_QUEUED_BYTES:
                self._counts["dropped"] += 1
                return
            self._queued.add(name.file)
            self._queued_bytes += page.nbytes
        self._queue.put((name, bytes(page)))

    def has(self, name: PageName) -> bool:
        """As far as is known without looking at the disk."""
        with self._lock:
            return name.file in self._sizes

    def read(self, name: PageName, into: memoryview) -> bool:
        """Fill ``into`` with the page. False when it isn't there, or isn't what its name says: then it is counted and removed,
        and ``into`` holds nothing that may be used."""
        with self._lock:
            if name.file not in self._sizes:
                return False
            self._sizes.move_to_end(name.file)
        path = self._folder / name.file
        try:
            wrong = self._read_checked(path, name, into)
            if wrong is None:
                os.utime(path)  # its age, for the next process
        except OSError as error:
            wrong = error.strerror or str(error)
        if wrong is not None:
            log.warning("ignored %s: %s", path.name, wrong)
        with self._lock:
            self._counts["read" if wrong is None else "corrupt"] += 1
        if wrong is not None:
            self._remove(name.file)
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
        """Remove all files of this fingerprint that are known."""
        with self._lock:
            files = list(self._sizes)
        for file in files:
            self._remove(file)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what was put so far, then end. May be called again. What isn't written in time is lost, and nothing else."""
        self._queue.put(None)
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.warning("gave up writing %d bytes of pages", self._queued_bytes)

    # --- files

    def _scan(self) -> None:
        found: list[tuple[float, str, int]] = []
        for entry in os.scandir(self._folder):
            told = entry.stat()
            if not entry.name.endswith(_SUFFIX):
                if time.time() - told.st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
                continue
            found.append((told.st_mtime, entry.name, told.st_size))
        for _, file, size in sorted(found):
            self._sizes[file] = size
            self._num_bytes += size
        self._make_room()

    def _read_checked(self, path: Path, name: PageName, into: memoryview) -> str | None:
        """None, or what is wrong."""
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            num_read = file.readinto(into)
            longer = file.read(1)
        if len(header) < _HEADER.size or num_read < into.nbytes:
            return "cut short"
        if longer:
            return "longer than a page"
        expected = self._header(name, into)
        return None if header == expected else _difference(header, expected)

    def _header(self, name: PageName, page: memoryview | bytes) -> bytes:
        def pack(checksum: int) -> bytes:
            kind = _KINDS[name.kind]
            return _HEADER.pack(_MAGIC, FORMAT, kind, self._fingerprint, name.digest, name.position, len(page), checksum)

        hasher = xxhash.xxh3_64(pack(0))
        hasher.update(page)
        return pack(hasher.intdigest())

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            name, page = job
            try:
                self._write(name, page)
                outcome = "written"
            except OSError as error:
                log.warning("can't write %s: %s", name.file, error.strerror)
                outcome = "failed"
            with self._lock:
                self._counts[outcome] += 1
                self._queued.discard(name.file)
                self._queued_bytes -= len(page)

    def _write(self, name: PageName, page: bytes) -> None:
        path = self._folder / name.file
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            with partial.open("wb") as file:
                file.write(self._header(name, page))
                file.write(page)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        size = _HEADER.size + len(page)
        with self._lock:
            self._num_bytes += size - self._sizes.pop(name.file, 0)
            self._sizes[name.file] = size
        self._make_room()

    def _make_room(self) -> None:
        while True:
            with self._lock:
                if self._num_bytes <= self._max_bytes:
                    return
                oldest = next(iter(self._sizes))
                self._counts["removed"] += 1
            self._remove(oldest)

    def _remove(self, file: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(file, 0)
        (self._folder / file).unlink(missing_ok=True)


def _difference(header: bytes, expected: bytes) -> str:
    fields = ("magic", "format", "kind", "fingerprint", "digest", "position", "size", "checksum")
    pairs = zip(fields, _HEADER.unpack(header), _HEADER.unpack(expected), strict=True)
    return f"another {next(field for field, found, wanted in pairs if found != wanted)}"
