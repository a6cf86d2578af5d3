"""Tool calls in text that comes in pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'


def run(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    text, calls = "", []
    for piece in pieces:
        shown, found = parser.push(piece)
        text += shown
        calls += found
    shown, found = parser.flush()
    return text + shown, [(call.name, call.arguments) for call in [*calls, *found]]


LS = ("bash", json.dumps({"cmd": "ls"}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text <b", ("just text <b", [])),
        (CALL, ("", [LS])),
        (f"I look.\n{CALL}", ("I look.", [LS])),
        (f"{CALL}\n{CALL}\n", ("", [LS, LS])),
        (f"{CALL} done", ("done", [LS])),
        (CALL.removesuffix("</tool_call>"), ("", [LS])),
        ("<tool_call>not json</tool_call> x", ("<tool_call>not json</tool_call> x", [])),
        ("<tool_call>{", ("<tool_call>{", [])),
        ('<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
    ],
)
def test_whole_and_character_by_character(text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    assert run([text]) == expected
    assert run(list(text)) == expected


@given(cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=6))
def test_cuts_dont_matter(cuts: list[int]) -> None:
    text = f"first \n {CALL} <tool {CALL}\n\nlast  "
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert run([text[a:b] for a, b in itertools.pairwise(places)]) == run([text])
