"""The folder of one model's page files, as the disk has it. Processes share it: what it holds may come and go at any time.

A file is written beside its name and renamed into place, so that a reader sees a whole file or none. To forget all, the folder is
renamed, which is done at once and for good; whoever writes next makes it anew. What the disk refuses is logged, seldom, and told
in what is returned: it is nobody's end.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from engine.page_file import PAGE_FILE, PageName, page_header, read_page
from engine.seldom import Seldom

Found = Literal["read", "corrupt", "gone", "unreadable"]
"""corrupt: not what the name says. gone: another process has removed it. unreadable: the disk or its rights refuse; it may be all right."""

_OURS = re.compile(rf"{PAGE_FILE}(\.[0-9a-f]+\.partial)?")
"""A page, or one that is being written."""
_FLUSHED = re.compile(r"[0-9a-f]{32}\.[0-9a-f]+\.flushed")
_ABANDONED_S = 3600.0
"""A file that is being written isn't older. If one is all the same, its writer only counts a failure."""


class PageFolder:
    def __init__(self, directory: Path, fingerprint: bytes, log: logging.Logger) -> None:
        """Raises OSError when there can't be such a folder."""
        self._directory = directory
        self._path = directory / fingerprint.hex()
        self._fingerprint = fingerprint
        self._life = secrets.token_hex(8)  # process ids repeat: in two containers that share a volume both are 1
        self._seldom = Seldom(log)
        self._left: set[str] = set()  # folders that were set aside and can't be removed
        self._path.mkdir(parents=True, exist_ok=True)

    def pages(self) -> list[tuple[PageName, int]]:
        """Names and bytes, the least recently used first. Raises OSError when the folder can't be listed.

        What a process left half-written when it died is removed.
        """
        found: list[tuple[float, PageName, int]] = []
        for name, told in self._entries():
            page = PageName.of(name)
            if page is not None:
                found.append((told.st_mtime, page, told.st_size))
            elif time.time() - told.st_mtime > _ABANDONED_S:
                self._unlink(self._path / name)
        return [(page, size) for _, page, size in sorted(found, key=lambda each: each[0])]

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Regular files that are named as ours; without those that go meanwhile."""
        for entry in _entries_of(self._path):
            with suppress(OSError):
                if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)

    def read(self, name: PageName, into: Sequence[memoryview]) -> Found:
        """Fill ``into``; unless it is "read" it holds nothing that may be used."""
        path = self._path / name.file
        try:
            with path.open("rb") as file:
                wrong = read_page(file, name, self._fingerprint, into)
        except FileNotFoundError:
            return "gone"
        except OSError as error:
            self._seldom.warning("read", f"can't read {name.file}: {error.strerror}")
            return "unreadable"
        if wrong is not None:
            self._seldom.warning("corrupt", f"ignored {name.file}: {wrong}")
            return "corrupt"
        with suppress(OSError):  # its age, for the next process; that it can't be set is no fault of the page
            os.utime(path)
        return "read"

    def write(self, name: PageName, parts: Sequence[bytes], wanted: Callable[[], bool]) -> int:
        """Bytes of the file; 0 when it couldn't be written, or when it isn't ``wanted`` once the folder is open: what is set aside
        after that takes the file along."""
        try:
            with self._opened() as folder:
                return self._write_in(folder, name, parts) if wanted() else 0
        except OSError as error:
            self._seldom.warning("write", f"can't write {name.file}: {error.strerror}")
            return 0

    def _write_in(self, folder: int, name: PageName, parts: Sequence[bytes]) -> int:
        partial = f"{name.file}.{self._life}.partial"
        whole = [page_header(name, self._fingerprint, parts), *parts]
        try:
            with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=folder)) as file:
                file.writelines(whole)
            os.replace(partial, name.file, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):  # the next process removes it
                os.unlink(partial, dir_fd=folder)
            raise
        return sum(map(len, whole))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        self._path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield folder
        finally:
            os.close(folder)

    def remove(self, name: PageName) -> bool:
        """False: it is still there."""
        return self._unlink(self._path / name.file)

    def set_aside(self) -> bool:
        """Forget all pages, whoever wrote them, at once. False: they are still there."""
        try:
            self._path.rename(self._directory / f"{self._path.name}.{secrets.token_hex(8)}.flushed")
        except FileNotFoundError:  # another process has done it
            return True
        except OSError as error:
            self._seldom.warning("flush", f"can't forget the pages in {self._path}: {error.strerror}")
            return False
        return True

    def remove_set_aside(self) -> int:
        """What was forgotten, by whichever process, in this life or another. Returns how many files couldn't be removed.

        What isn't ours stays where it is. What couldn't be removed isn't tried again in this life.
        """
        return sum(self._remove_folder(self._directory / name) for name in self._names_aside() if name not in self._left)

    def _names_aside(self) -> list[str]:
        try:
            return [entry.name for entry in _entries_of(self._directory) if _FLUSHED.fullmatch(entry.name)]
        except OSError as error:
            self._seldom.warning("remove", f"can't list {self._directory}: {error.strerror}")
            return []

    def _remove_folder(self, path: Path) -> int:
        stuck = 0
        try:
            for entry in _entries_of(path):
                if _OURS.fullmatch(entry.name):
                    stuck += not self._unlink(path / entry.name)
            path.rmdir()
        except FileNotFoundError:  # another process has removed it
            pass
        except OSError as error:
            self._left.add(path.name)
            self._seldom.warning("remove", f"can't remove {path}: {error.strerror}")
        return stuck

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._seldom.warning("remove", f"can't remove {path}: {error.strerror}")
            return False
        return True


def _entries_of(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:  # another process has set it aside, or removed it
        return []
