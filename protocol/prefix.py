"""Names for prefixes of token sequences, so that a router can tell which worker holds the longest one. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import xxhash


def prefix_digests(token_ids: Sequence[int], positions: Iterable[int], cache_salt: str | None = None) -> dict[int, int]:
    """Position p -> xxh3-64 over the salt and tokens [0, p), in one pass over the tokens. Positions that aren't there are left out.

    Only a hint: who acts on an equal digest must get the right answer from a worker that holds something else.
    """
    hasher = xxhash.xxh3_64((cache_salt or "").encode() + b"\0")
    tokens = array("I", token_ids)
    digests: dict[int, int] = {}
    done = 0
    for position in sorted({p for p in positions if 0 < p <= len(token_ids)}):
        hasher.update(tokens[done:position].tobytes())
        digests[position] = hasher.intdigest()
        done = position
    return digests
