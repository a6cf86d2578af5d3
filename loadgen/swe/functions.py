"""Random functions, and arguments to call them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from loadgen.swe.formula import OPERATORS, PARTS, RELATIONS, Atom, Call, Chain, Comparison, Formula, Function, Part, Total
from loadgen.swe.words import WORDS

Case = dict[str, int | list[int]]
"""Arguments by name."""


def draw_name(random: Random) -> str:
    return "_".join(random.sample(WORDS, 2))


def draw_functions(random: Random, shapes: Iterable[type[Formula]]) -> list[Function]:
    """One of each shape; before a call that has nothing to call comes a helper."""
    functions: list[Function] = []
    for shape in shapes:
        function = _draw_function(random, shape, functions)
        if function is None:
            functions.append(_draw_helper(random))
            function = _draw_function(random, shape, functions)
            assert function is not None, "there is a helper now"
        functions.append(function)
    return functions


def _draw_helper(random: Random) -> Function:
    """One number to another."""
    argument = random.choice(WORDS)
    return Function(draw_name(random), (argument,), _chain(random, [argument], with_number=True))


def _draw_function(random: Random, shape: type[Formula], known: Sequence[Function]) -> Function | None:
    """None: a call needs a helper among the functions known so far."""
    words = random.sample(WORDS, random.choice((2, 2, 3)))
    with_number = random.random() < 0.6
    formula: Formula
    if shape is Chain:
        formula = _chain(random, words, with_number)
    elif shape is Comparison:
        relation = random.choice(tuple(RELATIONS))
        formula = Comparison(words[0], relation, _chain(random, words[1:], with_number))
    elif shape is Total:
        words = words[: 1 if with_number else 2]
        term: Atom = random.randint(2, 9) if with_number else words[1]
        formula = Total(random.choice(tuple(OPERATORS)), term, random.randint(1, 2), words[0])
    elif shape is Part:
        words = words[:1]
        formula = Part(words[0], random.choice(tuple(PARTS)), random.randint(1, 3))
    else:
        helpers = [function for function in known if len(function.arguments) == 1 and isinstance(function.formula, Chain)]
        if not helpers:
            return None
        words = words[:2]
        callee = random.choice(helpers)
        formula = Call(callee.name, callee, words[0], random.choice(tuple(OPERATORS)), words[1])
    arguments = tuple(random.sample(words, len(words)))
    return Function(draw_name(random), arguments, formula)


def draw_case(random: Random, function: Function) -> Case:
    formula = function.formula
    if isinstance(formula, Part):
        return {formula.name: [random.randint(1, 30) for _ in range(random.randint(5, 6))]}
    case: Case = {name: random.randint(2, 12) for name in function.arguments}
    if isinstance(formula, Total):
        case[formula.last] = random.randint(3, 6)
    elif isinstance(formula, Comparison):
        # near the boundary, where operators differ
        case[formula.left] = formula.right.value(case) + random.randint(-2, 2)
    return case


def _chain(random: Random, names: Sequence[str], with_number: bool) -> Chain:
    atoms: list[Atom] = list(names)
    operators = [random.choice("++--*") for _ in range(len(atoms) - 1 + with_number)]
    if with_number:
        place = random.randint(1, len(atoms))
        times = "*" in operators[place - 1 : place + 1]
        atoms.insert(place, random.randint(2, 9 if times else 30))
    return Chain(tuple(atoms), tuple(operators))
