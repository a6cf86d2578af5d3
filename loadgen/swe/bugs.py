"""One bug of a given kind put into a formula. A bug makes the code disagree with its docstring, which stays right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import TypeVar

from loadgen.swe.formula import OPERATORS, RELATIONS, Atom, Call, Chain, Comparison, Formula, Function, Part, Total
from loadgen.swe.words import WORDS

T = TypeVar("T")


class BugKind(StrEnum):
    OPERATOR = "operator"
    CONSTANT = "constant"
    OPERAND = "operand"
    OFF_BY_ONE = "off_by_one"
    WRONG_NAME = "wrong_name"
    MISSING_RETURN = "missing_return"


SHAPES: dict[BugKind, tuple[type, ...]] = {
    BugKind.OPERATOR: (Chain, Chain, Comparison, Total, Call),
    BugKind.CONSTANT: (Chain, Chain, Comparison, Total, Part),
    BugKind.OPERAND: (Chain, Chain, Comparison, Call),
    BugKind.OFF_BY_ONE: (Total, Total, Part, Comparison),
    BugKind.WRONG_NAME: (Chain, Comparison, Total, Part, Call),
    BugKind.MISSING_RETURN: (Chain, Comparison, Total, Part, Call),
}
"""Which shapes can have which bug; named twice: twice as often."""


def break_formula(random: Random, kind: BugKind, function: Function) -> Formula | None:
    """The formula of the broken code. None: this formula can't have such a bug. MISSING_RETURN leaves it as it is."""
    formula = function.formula
    match kind:
        case BugKind.OPERATOR:
            return _other_operator(random, formula)
        case BugKind.CONSTANT:
            return _other_number(random, formula)
        case BugKind.OPERAND:
            return _rename(random, formula, lambda old: [name for name in function.arguments if name != old])
        case BugKind.OFF_BY_ONE:
            return _one_off(random, formula)
        case BugKind.WRONG_NAME:
            return _wrong_name(random, function)
        case BugKind.MISSING_RETURN:
            return formula


def broken_line(kind: BugKind, formula: Formula) -> str:
    """What stands in the code for a formula that ``break_formula`` gave."""
    return formula.code() if kind is BugKind.MISSING_RETURN else f"return {formula.code()}"


def _other_operator(random: Random, formula: Formula) -> Formula | None:
    match formula:
        case Chain():
            place = random.randrange(len(formula.operators))
            return replace(formula, operators=_with(formula.operators, place, _other(random, OPERATORS, formula.operators[place])))
        case Comparison():
            return replace(formula, relation=_other(random, RELATIONS, formula.relation))
        case Total() | Call():
            return replace(formula, operator=_other(random, OPERATORS, formula.operator))
        case Part():
            return None


def _other_number(random: Random, formula: Formula) -> Formula | None:
    match formula:
        case Chain():
            places = [place for place, atom in enumerate(formula.atoms) if isinstance(atom, int)]
            if not places:
                return None
            place = random.choice(places)
            return replace(formula, atoms=_with(formula.atoms, place, _number_beside(random, formula.atoms[place])))
        case Comparison():
            right = _other_number(random, formula.right)
            return replace(formula, right=right) if isinstance(right, Chain) else None
        case Total():
            return replace(formula, term=_number_beside(random, formula.term)) if isinstance(formula.term, int) else None
        case Part():
            return replace(formula, size=random.choice([size for size in (1, 2, 3, 4) if size != formula.size]))
        case Call():
            return replace(formula, atom=_number_beside(random, formula.atom)) if isinstance(formula.atom, int) else None


def _one_off(random: Random, formula: Formula) -> Formula | None:
    match formula:
        case Total():
            return random.choice([replace(formula, inclusive=False), replace(formula, first=formula.first + 1)])
        case Part():
            return replace(formula, size=formula.size + random.choice([-1, 1])) if formula.size > 1 else replace(formula, size=2)
        case Comparison():
            strict = {">=": ">", ">": ">=", "<=": "<", "<": "<="}
            return replace(formula, relation=strict[formula.relation])
        case Chain() | Call():
            return None


def _rename(random: Random, formula: Formula, others: Callable[[str], Sequence[str]]) -> Formula | None:
    """One of its names replaced by one of ``others(name)``."""
    match formula:
        case Chain():
            places = [place for place, atom in enumerate(formula.atoms) if isinstance(atom, str) and others(atom)]
            if not places:
                return None
            place = random.choice(places)
            return replace(formula, atoms=_with(formula.atoms, place, random.choice(others(str(formula.atoms[place])))))
        case Comparison():
            right = _rename(random, formula.right, others) if random.random() < 0.5 else None
            if isinstance(right, Chain):
                return replace(formula, right=right)
            return replace(formula, left=random.choice(others(formula.left))) if others(formula.left) else None
        case Total():
            if isinstance(formula.term, str) and others(formula.term) and random.random() < 0.5:
                return replace(formula, term=random.choice(others(formula.term)))
            return replace(formula, last=random.choice(others(formula.last))) if others(formula.last) else None
        case Part():
            return replace(formula, name=random.choice(others(formula.name))) if others(formula.name) else None
        case Call():
            return replace(formula, argument=random.choice(others(formula.argument))) if others(formula.argument) else None


def _wrong_name(random: Random, function: Function) -> Formula | None:
    formula = function.formula
    if isinstance(formula, Call) and random.random() < 0.5:
        head, _, tail = formula.name.partition("_")
        return replace(formula, name=f"{head}_{_other(random, WORDS, tail)}", callee=None)
    unknown = _other_words(random, function.arguments)
    return _rename(random, formula, lambda _: [unknown])


def _other_words(random: Random, known: Sequence[str]) -> str:
    while (word := random.choice(WORDS)) in known:
        pass
    return word


def _number_beside(random: Random, number: Atom) -> int:
    """Another number, as many digits or fewer: products stay small."""
    assert isinstance(number, int)
    while (other := random.randint(2, 9 if number < 10 else 40)) == number:
        pass
    return other


def _other(random: Random, among: Iterable[str], old: str) -> str:
    return random.choice([one for one in among if one != old])


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
