"""JSON as the router speaks it: answers are ASCII, so that they can always be sent, and what comes in is valid Unicode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from starlette.responses import Response

MAX_SHOWN = 100
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class NotUnicode(ValueError):
    """A string or key has half of a surrogate pair, which is no character; ``path`` leads to it."""

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__("it has half of a surrogate pair, so it isn't valid Unicode")
        self.path = path


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode("ascii")


def parse_json(text: str) -> object:
    """Raises ValueError: no JSON (NaN isn't), nested too deeply, or NotUnicode."""
    try:
        value: object = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _SURROGATE_ESCAPE.search(text):
        _check_unicode(value)
    return value


def shown(value: object) -> str:
    """As JSON for a message, cut where it gets long."""
    try:
        told = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        told = "[…" if isinstance(value, list) else "{…"
    return told if len(told) <= MAX_SHOWN else f"{told[:MAX_SHOWN]}…"


def _check_unicode(value: object) -> None:
    """Without recursion: there may be a thousand levels."""
    rest: list[tuple[tuple[str, ...], object]] = [((), value)]
    while rest:
        path, item = rest.pop()
        if isinstance(item, str) and _SURROGATE.search(item):
            raise NotUnicode(path)
        rest += [((*path, key), child) for key, child in _children(item)]
        for key in item if isinstance(item, dict) else ():
            if _SURROGATE.search(key):
                raise NotUnicode((*path, json.dumps(key)[1:-1]))


def _children(item: object) -> Iterator[tuple[str, object]]:
    """Last one first: a stack gives them back in order."""
    if isinstance(item, dict):
        yield from reversed(item.items())
    elif isinstance(item, list):
        yield from ((str(place), item[place]) for place in reversed(range(len(item))))


def _refuse_constant(name: str) -> Callable[[str], object]:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
