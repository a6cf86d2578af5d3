"""The second tier of the prefix cache: evicted pages in host files, found again by what their tokens are, after a restart too.

Which pages there are, how many bytes they may take, and a thread that writes them. Whatever is wrong with a file or the disk,
the page counts as not there: the tokens are recomputed. Files of another model lie in another folder and are never opened.

Point ``directory`` at a memory file system (/dev/shm) to have the tier in shared memory. Workers may share a directory: a name
always means the same tokens. Each bounds what it knows of, and knows all at its start; what one forgets is gone for all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Literal

from engine.page_file import PageName
from engine.page_folder import PageFolder

MAX_QUEUED_BYTES = 256 << 20
"""Copies of pages that wait to be written; more are not kept. One page may be larger."""
LEAVE_S = 30.0
"""Most seconds that writing what is left takes at the end."""

log = logging.getLogger("baton.cache")


class SnapshotFiles:
    """Pages in, pages out. ``put`` never waits for a disk before ``leave``; ``read`` reads one file. For one thread, but for the counts."""

    def __init__(self, directory: Path, fingerprint: bytes, max_bytes: int) -> None:
        """``fingerprint``: 16 bytes, of everything that decides what a page's bytes mean. Raises OSError when the directory can't be
        made or read.

        The oldest files go when there are more than ``max_bytes``, and what a process left half-written or half-removed when it died.
        """
        self._folder = PageFolder(directory, fingerprint, log)
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._sizes: OrderedDict[PageName, int] = OrderedDict(self._folder.pages())  # by age of use, oldest first
        self._num_bytes = sum(self._sizes.values())
        self._queued: OrderedDict[PageName, list[bytes]] = OrderedDict()  # the first is being written
        self._queued_bytes = 0
        self._flushed = True  # it may be that something set aside is there, of an earlier life
        self._leave_by: float | None = None
        self._ended = False
        self._counts: Counter[str] = Counter()
        self._make_room()
        self._writer = threading.Thread(target=self._write_all, name="snapshot-files", daemon=True)
        self._writer.start()

    # --- the cache's doors

    def put(self, name: PageName, *parts: memoryview) -> None:
        """Keep a copy of ``parts``. It is in a file a little later, or nowhere when the disk can't keep up."""
        size = sum(part.nbytes for part in parts)
        with self._changed:
            if name in self._queued:
                return
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return
            if self._ended or not self._wait_for_room(size):
                self._counts["dropped"] += 1
                return
            self._queued[name] = [bytes(part) for part in parts]
            self._queued_bytes += size
            self._changed.notify_all()

    def _wait_for_room(self, size: int) -> bool:
        """Whether there is room in the queue; it is waited for only by who leaves."""

        def has_room() -> bool:
            return not self._queued or self._queued_bytes + size <= MAX_QUEUED_BYTES

        if has_room() or self._leave_by is None:
            return has_room()
        return self._changed.wait_for(has_room, self._leave_by - time.monotonic())

    def has(self, name: PageName) -> bool:
        """As far as is known without looking at the disk."""
        with self._changed:
            return name in self._sizes

    def names(self) -> list[PageName]:
        with self._changed:
            return list(self._sizes)

    def read(self, name: PageName, *into: memoryview) -> bool:
        """Fill ``into`` with what was put. False when it isn't there, can't be read or isn't what its name says: then it is counted
        and forgotten, removed if the file is wrong, and ``into`` holds nothing that may be used."""
        with self._changed:
            if name not in self._sizes:
                return False
            self._sizes.move_to_end(name)
        found = self._folder.read(name, into)
        if found == "corrupt":
            self._remove(name)
        elif found != "read":
            self._forget(name)
        self._count(found)
        return found == "read"

    def counts(self) -> dict[str, int]:
        """written, read, corrupt (ignored for what was wrong with them), gone (removed by another process), unreadable (the disk or its
        rights refuse), dropped (the disk couldn't keep up), failed (to be written), removed (for room), stuck (couldn't be removed)."""
        keys = ("written", "read", "corrupt", "gone", "unreadable", "dropped", "failed", "removed", "stuck")
        with self._changed:
            return {key: self._counts[key] for key in keys}

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return self._num_bytes

    def __len__(self) -> int:
        with self._changed:
            return len(self._sizes)

    def clear(self) -> None:
        """Forget all files, those of other processes too, and what waits to be written. No process finds them from now on; the writer
        removes them."""
        with self._changed:
            if not self._folder.set_aside():
                self._counts["stuck"] += len(self._sizes)
            self._sizes.clear()
            self._num_bytes = 0
            self._queued.clear()
            self._queued_bytes = 0
            self._flushed = True
            self._changed.notify_all()

    def leave(self, timeout_s: float = LEAVE_S) -> None:
        """The end is near: from now on ``put`` waits for the disk, all together with ``close`` for ``timeout_s`` seconds."""
        if self._leave_by is None:
            self._leave_by = time.monotonic() + timeout_s

    def close(self) -> None:
        """``leave``, write what was put so far, then end. May be called again. What isn't written in time is lost, and nothing else."""
        self.leave()
        assert self._leave_by is not None
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._writer.join(max(0.0, self._leave_by - time.monotonic()))
        if self._writer.is_alive():
            log.warning("gave up writing %d pages", len(self._queued))

    # --- the writer

    def _write_all(self) -> None:
        while (job := self._next()) is not None:
            if job == "remove":
                self._count("stuck", self._folder.remove_set_aside())
            else:
                self._write(*job)

    def _next(self) -> Literal["remove"] | tuple[PageName, list[bytes]] | None:
        """None: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._flushed or self._queued or self._ended)
            flushed, self._flushed = self._flushed, False
            return "remove" if flushed else next(iter(self._queued.items()), None)

    def _write(self, name: PageName, parts: list[bytes]) -> None:
        size = self._folder.write(name, parts, lambda: self._is_wanted(name, parts))
        with self._changed:
            if not self._is_wanted(name, parts):
                return
            del self._queued[name]
            self._queued_bytes -= sum(map(len, parts))
            self._counts["written" if size > 0 else "failed"] += 1
            if size > 0:
                self._sizes[name] = size
                self._num_bytes += size
            self._changed.notify_all()
        self._make_room()

    def _is_wanted(self, name: PageName, parts: list[bytes]) -> bool:
        """False when it was forgotten meanwhile, even if the same name was put again."""
        with self._changed:
            return self._queued.get(name) is parts

    # --- what is known

    def _make_room(self) -> None:
        while True:
            with self._changed:
                if self._num_bytes <= self._max_bytes:
                    return
                oldest = next(iter(self._sizes))
            if self._remove(oldest):
                self._count("removed")

    def _remove(self, name: PageName) -> bool:
        """Whatever the disk says, it isn't known any more: it won't be tried again in this life."""
        self._forget(name)
        removed = self._folder.remove(name)
        if not removed:
            self._count("stuck")
        return removed

    def _forget(self, name: PageName) -> None:
        with self._changed:
            self._num_bytes -= self._sizes.pop(name, 0)

    def _count(self, key: str, number: int = 1) -> None:
        with self._changed:
            self._counts[key] += number
