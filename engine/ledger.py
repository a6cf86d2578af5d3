"""Who needs which page of a pool. Counts only; no tensor is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

from kernels.contract import SINK


class Ledger:
    """Every page but the sink is free, used, or idle.

    used: requests hold it, one or several. idle: nobody but the prefix cache keeps it, and gives it up when it is asked for.
    So what is available is what is free or idle, and a page that the cache keeps is never in the way of a request.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = FreeRuns(SINK + 1, num_pages - 1)
        self._users = [0] * num_pages
        self._keeps = [0] * num_pages
        self.num_idle = 0
        self.num_kept = 0
        """Pages that the cache keeps, used or idle."""
        self.reclaim: Callable[[int], None] | None = None
        """``reclaim(count)``, set by the cache: drop idle pages until that many more are free."""

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_available(self) -> int:
        return self._free.count + self.num_idle

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Pages that were free, or were made so: the taker uses them. Precondition: count <= num_available."""
        if count > self._free.count:
            assert self.reclaim is not None, f"{count} pages asked for, {self._free.count} free"
            self.reclaim(count - self._free.count)
        pages = self._free.take(count, after)
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user each. Precondition: they are used or idle."""
        for page in pages:
            assert self._users[page] + self._keeps[page] > 0, f"page {page} is free"
            self.num_idle -= self.is_idle(page)
            self._users[page] += 1

    def give(self, pages: Iterable[int]) -> list[int]:
        """One user less each; returns those that are free now."""
        freed: list[int] = []
        for page in pages:
            assert self._users[page] > 0, f"page {page} is given back twice"
            self._users[page] -= 1
            self.num_idle += self.is_idle(page)
            if self._users[page] + self._keeps[page] == 0:
                freed.append(page)
        self._free.give(freed)
        return freed

    def keep(self, page: int) -> None:
        """The cache wants it once more. Precondition: it is used or idle."""
        assert self._users[page] + self._keeps[page] > 0, f"page {page} is free"
        self.num_kept += self._keeps[page] == 0
        self._keeps[page] += 1

    def drop(self, page: int) -> bool:
        """The cache wants it once less; True when it is free now."""
        assert self._keeps[page] > 0, f"page {page} isn't kept"
        self.num_idle -= self.is_idle(page)
        self._keeps[page] -= 1
        self.num_kept -= self._keeps[page] == 0
        self.num_idle += self.is_idle(page)
        freed = self._users[page] + self._keeps[page] == 0
        if freed:
            self._free.give([page])
        return freed

    def is_idle(self, page: int) -> bool:
        return self._users[page] == 0 < self._keeps[page]

    def free_ids(self) -> list[int]:
        return self._free.ids()

    def check(self, what: str, used: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        """The counts are those of the users and of the cache. Raises AssertionError that says what isn't so."""
        users, keeps = [0] * self.num_pages, [0] * self.num_pages
        for owner, pages in enumerate(used):
            for page in pages:
                assert SINK < page < self.num_pages, f"{what} {page} of owner {owner} is not in the pool of {self.num_pages}"
                users[page] += 1
        for page in kept:
            keeps[page] += 1
        free = set(self._free.ids())
        for page in range(SINK + 1, self.num_pages):
            counted, true = (self._users[page], self._keeps[page]), (users[page], keeps[page])
            assert counted == true, f"{what} {page} counts (users, keeps) {counted}, but has {true}"
            assert (page in free) == (true == (0, 0)), f"{what} {page} has (users, keeps) {true}, yet free is {page in free}"
        assert SINK not in free, f"the sink {what} is free"
        assert self.num_idle == sum(self.is_idle(page) for page in range(self.num_pages)), f"idle {what}s are miscounted"
        assert self.num_kept == sum(count > 0 for count in self._keeps), f"kept {what}s are miscounted"


class FreeRuns:
    """Free page ids, kept as runs of adjacent ones, so that a request's pages are few large pieces to a transfer."""

    def __init__(self, first: int, count: int) -> None:
        self._starts: list[int] = [first] if count else []
        self._lengths: dict[int, int] = {first: count} if count else {}
        self.count = count

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` ids, ascending within each run: those right behind ``after`` first, then the run that fits best.

        Precondition: count <= self.count.
        """
        assert count <= self.count, f"{count} pages asked for, {self.count} free"
        taken: list[int] = []
        if after is not None and after + 1 in self._lengths:
            taken += self._cut(after + 1, min(count, self._lengths[after + 1]))
        while len(taken) < count:
            missing = count - len(taken)
            start = self._best_run(missing)
            taken += self._cut(start, min(missing, self._lengths[start]))
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Precondition: none of them is free."""
        for page in ids:
            self._give_one(page)

    def ids(self) -> list[int]:
        return [page for start in self._starts for page in range(start, start + self._lengths[start])]

    def _best_run(self, count: int) -> int:
        """The shortest run that holds ``count``, else the longest; the lowest of equals."""
        return min(self._starts, key=lambda start: (self._lengths[start] < count, abs(self._lengths[start] - count), start))

    def _cut(self, start: int, count: int) -> list[int]:
        length = self._lengths.pop(start)
        self._starts.remove(start)
        if count < length:
            self._insert(start + count, length - count)
        self.count -= count
        return list(range(start, start + count))

    def _give_one(self, page: int) -> None:
        start, length = page, 1
        index = bisect_left(self._starts, page)
        if index > 0 and self._starts[index - 1] + self._lengths[self._starts[index - 1]] > page:
            raise AssertionError(f"page {page} is given back twice")
        if index < len(self._starts):
            assert self._starts[index] != page, f"page {page} is given back twice"
            if self._starts[index] == page + 1:
                length += self._lengths.pop(self._starts.pop(index))
        if index > 0 and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == page:
            start = self._starts.pop(index - 1)
            length += self._lengths.pop(start)
        self._insert(start, length)
        self.count += 1

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
