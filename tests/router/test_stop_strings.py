"""Stop strings over pieces: what is shown depends on the text, never on where it was cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopStrings


def run(pieces: Sequence[str], stops: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    machine = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        shown += machine.push(piece)
        if machine.matched is not None:
            return shown, machine.matched
    return shown + machine.flush(), None


def reference(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """One character after another."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_equals_one_character_at_a_time(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include=include) == reference("".join(pieces), stops, include=include)


@given(text=st.text(alphabet="ab", max_size=12), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_shown_and_taken_back(text: str, stops: list[str]) -> None:
    machine = StopStrings(stops)
    final, _ = reference(text, stops, include=False)
    shown = ""
    for character in text:
        shown += machine.push(character)
        assert final.startswith(shown)
        if machine.matched is not None:
            break


def test_text_that_cant_become_a_stop_string_is_shown_at_once() -> None:
    machine = StopStrings(["END"])
    assert machine.push("abcE") == "abc"
    assert machine.push("x") == "Ex"


def test_skipped_text_holds_no_match_and_starts_none() -> None:
    machine = StopStrings(["ab"])
    assert machine.skip("ab") == "ab"
    assert machine.skip("a") == "a"
    assert machine.push("b") == "b"
    assert machine.matched is None


def test_an_empty_stop_string_is_the_callers_mistake() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])
