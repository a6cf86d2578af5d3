"""How a test run came out, and how an agent is told: short, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_FAILURES = 3
MAX_DETAIL = 160


@dataclass(frozen=True, slots=True)
class Failure:
    title: str
    """``net_price in prices.py``."""
    detail: str
    """``expected 12, got 7``, or an exception."""


@dataclass(frozen=True, slots=True)
class Outcome:
    num_tests: int
    failures: Sequence[Failure]

    @property
    def passed(self) -> bool:
        return self.num_tests > 0 and not self.failures

    def text(self) -> str:
        if self.passed:
            return f"OK: {_tests(self.num_tests)} passed"
        lines = [f"FAILED {failure.title}: {failure.detail}" for failure in self.failures[:MAX_FAILURES]]
        return "\n".join([*lines, f"{len(self.failures)} of {_tests(self.num_tests)} failed"])


def unequal(expected: object, got: object) -> str:
    return f"expected {expected!r}, got {got!r}"


def from_exception(type_name: str, message: str) -> str:
    """What unittest caught, in one line: ``7 != 12`` of assertEqual(got, expected) becomes ``expected 12, got 7``."""
    first, _, _ = message.partition("\n")
    if type_name == "AssertionError":
        got, differ, expected = first.removeprefix("Lists differ: ").partition(" != ")
        if differ:
            return f"expected {expected}, got {got}"[:MAX_DETAIL]
    return f"{type_name}: {first}"[:MAX_DETAIL] if first else type_name


def _tests(number: int) -> str:
    return f"{number} test" if number == 1 else f"{number} tests"
