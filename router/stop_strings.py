"""Stop strings over text that comes in pieces. Pure; the result doesn't depend on where the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Shows text as soon as no stop string can begin in it any more.

    The match that ends first wins, and of those the longest: what a reader who looks at one character after another would find.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``stops`` are not empty. ``include``: the matched string is shown too."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now. After a match (``matched`` is set) nothing more may be pushed."""
        assert self.matched is None, "text after the match"
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            end, start = found
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include else start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def skip(self, piece: str) -> str:
        """Text in which no stop string counts, as before ``min_tokens``: all of it is shown."""
        text, self._held = self._held + piece, ""
        return text

    def flush(self) -> str:
        """The rest, when the text has ended without a match."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str) -> tuple[int, int] | None:
        """(end, start) of the match."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
