"""One page in one file: what it is called, what is in it, and whether that is what the name says.

The header says which format, model, layout, kind and position the page is for; its checksum covers header and page.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Literal

import xxhash

PageKind = Literal["block", "snapshot"]

FORMAT = 1
_MAGIC = b"baton-page\n"
_HEADER = struct.Struct("<11sBB16s32sQQQ")
"""magic, format, kind, fingerprint, digest, position, bytes that follow, xxh3-64 of all that and them."""
_KINDS: dict[PageKind, int] = {"block": 1, "snapshot": 2}
_SUFFIX = ".page"
PAGE_FILE = rf"(block|snapshot)-((?:[0-9a-f]{{2}}){{1,32}})-(\d{{1,18}}){re.escape(_SUFFIX)}"
"""The names of files that hold pages, as a regular expression."""
_FILE = re.compile(PAGE_FILE)


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


def page_header(name: PageName, fingerprint: bytes, parts: Sequence[memoryview | bytes]) -> bytes:
    """What goes before ``parts`` in the file."""
    size = sum(len(part) for part in parts)

    def pack(checksum: int) -> bytes:
        return _HEADER.pack(_MAGIC, FORMAT, _KINDS[name.kind], fingerprint, name.digest, name.position, size, checksum)

    hasher = xxhash.xxh3_64(pack(0))
    for part in parts:
        hasher.update(part)
    return pack(hasher.intdigest())


def read_page(file: BufferedReader, name: PageName, fingerprint: bytes, into: Sequence[memoryview]) -> str | None:
    """Fill ``into``. None, or what is wrong: then ``into`` holds nothing that may be used."""
    header = file.read(_HEADER.size)
    num_read = sum(file.readinto(part) for part in into)
    longer = file.read(1)
    if len(header) < _HEADER.size or num_read < sum(part.nbytes for part in into):
        return "cut short"
    if longer:
        return "too long"
    expected = page_header(name, fingerprint, into)
    return None if header == expected else _difference(header, expected)


def _difference(header: bytes, expected: bytes) -> str:
    fields = ("magic", "format", "kind", "fingerprint", "digest", "position", "size", "checksum")
    pairs = zip(fields, _HEADER.unpack(header), _HEADER.unpack(expected), strict=True)
    return f"another {next(field for field, found, wanted in pairs if found != wanted)}"
