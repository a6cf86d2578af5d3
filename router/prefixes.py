"""Which beginnings of prompts a worker is likely to hold in its prefix cache: what the router sent there lately, as far as it fits there.

A hint for placement and never a promise: workers evict as they see fit, and say with each request what they really held.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from protocol.messages import CacheUse

PIECE_TOKENS = 64
"""Beginnings are told apart in steps of so many tokens: hashing 16,000 tokens takes 0.3 ms."""

Chain = tuple[int, ...]
"""One number for each beginning of 1, 2, 3, ... pieces. Equal numbers, equal beginnings under the same salt."""


def chain_of(token_ids: Sequence[int], cache: CacheUse) -> Chain:
    """Empty when the request shares nothing."""
    if not cache.enabled:
        return ()
    pieces = memoryview(array("q", token_ids).tobytes())
    step = 8 * PIECE_TOKENS
    chain = [xxh3_64_intdigest((cache.salt or "").encode())]
    for start in range(0, len(pieces) - step + 1, step):
        chain.append(xxh3_64_intdigest(pieces[start : start + step], seed=chain[-1]))
    return tuple(chain[1:])


class HeldPrefixes:
    """Of one worker. The least recently used are forgotten first, longer ones before their own beginnings, so that what is known of a
    prompt is always one beginning of it.
    """

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: what the worker has room for."""
        self._limit = max_tokens // PIECE_TOKENS
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def note(self, chain: Chain) -> None:
        """The worker computes or fetches this prompt."""
        for number in reversed(chain[: self._limit]):
            self._numbers[number] = None
            self._numbers.move_to_end(number)
        while len(self._numbers) > self._limit:
            self._numbers.popitem(last=False)

    def num_tokens(self, chain: Chain) -> int:
        """Length of the longest beginning that it is likely to hold."""
        return PIECE_TOKENS * bisect_left(chain, True, key=lambda number: number not in self._numbers)

    def clear(self) -> None:
        self._numbers.clear()
