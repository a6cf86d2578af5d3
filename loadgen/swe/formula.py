"""What a function computes, three times over: as words for its docstring, as Python, and as a value.

The words follow the Python part by part, so the code can be written from the docstring by copying names and numbers and putting
operators for words. Values are worked out here, without compiling anything: making instances has to be fast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = int | bool | list[int] | None
Env = Mapping[str, int | list[int]]
Atom = str | int
"""A name or a number."""

OPERATORS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("plus", operator.add),
    "-": ("minus", operator.sub),
    "*": ("times", operator.mul),
}
RELATIONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    ">=": ("at least", operator.ge),
    "<=": ("at most", operator.le),
    ">": ("above", operator.gt),
    "<": ("below", operator.lt),
}
PARTS = {
    "[{}:]": "{} without the first {}",
    "[:-{}]": "{} without the last {}",
    "[:{}]": "the first {} of {}",
    "[-{}:]": "the last {} of {}",
}


def look_up(atom: Atom, env: Env) -> int:
    """Raises NameError with Python's own message."""
    if isinstance(atom, int):
        return atom
    value = _named(atom, env)
    assert isinstance(value, int), f"{atom} is a number"
    return value


def _named(name: str, env: Env) -> int | list[int]:
    try:
        return env[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined") from None


@dataclass(frozen=True, slots=True)
class Chain:
    """``price + tax - 7``."""

    atoms: tuple[Atom, ...]
    operators: tuple[str, ...]

    def words(self) -> str:
        return str(self.atoms[0]) + "".join(f" {OPERATORS[op][0]} {atom}" for op, atom in zip(self.operators, self.atoms[1:], strict=True))

    def code(self) -> str:
        return str(self.atoms[0]) + "".join(f" {op} {atom}" for op, atom in zip(self.operators, self.atoms[1:], strict=True))

    def value(self, env: Env) -> int:
        total, product, sign = 0, look_up(self.atoms[0], env), 1
        for op, atom in zip(self.operators, self.atoms[1:], strict=True):
            value = look_up(atom, env)
            if op == "*":
                product *= value
            else:
                total, product, sign = total + sign * product, value, 1 if op == "+" else -1
        return total + sign * product


@dataclass(frozen=True, slots=True)
class Comparison:
    """``price >= tax + 3``."""

    left: str
    relation: str
    right: Chain

    def words(self) -> str:
        return f"whether {self.left} is {RELATIONS[self.relation][0]} {self.right.words()}"

    def code(self) -> str:
        return f"{self.left} {self.relation} {self.right.code()}"

    def value(self, env: Env) -> bool:
        return RELATIONS[self.relation][1](look_up(self.left, env), self.right.value(env))


@dataclass(frozen=True, slots=True)
class Total:
    """``sum(i * rate for i in range(1, count + 1))``."""

    operator: str
    term: Atom
    first: int
    last: str
    inclusive: bool = True

    def words(self) -> str:
        return f"the sum of i {OPERATORS[self.operator][0]} {self.term} for i from {self.first} to {self.last}"

    def code(self) -> str:
        return f"sum(i {self.operator} {self.term} for i in range({self.first}, {self.last}{' + 1' if self.inclusive else ''}))"

    def value(self, env: Env) -> int:
        # Python evaluates the range before the first term: names fail in that order
        numbers = range(self.first, look_up(self.last, env) + self.inclusive)
        combine = OPERATORS[self.operator][1]
        return sum(combine(i, look_up(self.term, env)) for i in numbers)


@dataclass(frozen=True, slots=True)
class Part:
    """``items[2:]``."""

    name: str
    form: str
    size: int

    def words(self) -> str:
        wording = PARTS[self.form]
        return wording.format(self.name, self.size) if wording.startswith("{}") else wording.format(self.size, self.name)

    def code(self) -> str:
        return self.name + self.form.format(self.size)

    def value(self, env: Env) -> list[int]:
        values = _named(self.name, env)
        assert isinstance(values, list), f"{self.name} is a list"
        match self.form:
            case "[{}:]":
                return values[self.size :]
            case "[:-{}]":
                return values[: -self.size]
            case "[:{}]":
                return values[: self.size]
            case _:
                return values[-self.size :]


@dataclass(frozen=True, slots=True)
class Call:
    """``add_tax(price) + fee``."""

    name: str
    callee: Function | None
    """None: nothing has this name."""
    argument: str
    operator: str
    atom: Atom

    def words(self) -> str:
        return f"{self.name} of {self.argument}, {OPERATORS[self.operator][0]} {self.atom}"

    def code(self) -> str:
        return f"{self.name}({self.argument}) {self.operator} {self.atom}"

    def value(self, env: Env) -> int:
        if self.callee is None:
            raise NameError(f"name {self.name!r} is not defined")
        result = self.callee.formula.value({self.callee.arguments[0]: look_up(self.argument, env)})
        assert isinstance(result, int), "helpers give numbers"
        return OPERATORS[self.operator][1](result, look_up(self.atom, env))


Formula = Chain | Comparison | Total | Part | Call


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    arguments: tuple[str, ...]
    formula: Formula

    def text(self, line: str | None = None) -> str:
        """Its source. ``line``: what stands in place of the line that returns."""
        body = line if line is not None else self.line()
        return f'def {self.name}({", ".join(self.arguments)}):\n    """Return {self.formula.words()}."""\n    {body}\n'

    def line(self) -> str:
        return f"return {self.formula.code()}"
