"""An instance: a small repository with one bug, made from a seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from loadgen.swe.bugs import SHAPES, BugKind, break_formula, broken_line
from loadgen.swe.formula import Call, Chain, Comparison, Formula, Function, Part, Total, Value
from loadgen.swe.functions import Case, draw_case, draw_functions
from loadgen.swe.outcome import Failure, Outcome, unequal
from loadgen.swe.words import WORDS

FIRST_TRAINING_SEED = 1_000_000
VISIBLE_TEST = "test_visible.py"
HIDDEN_TEST = "test_hidden.py"
MAX_TRIES = 500
ALL_SHAPES = (Chain, Chain, Comparison, Total, Part, Call)
WITH_MODULE = (
    "{function} in {module} gives a wrong result.",
    "Please fix {function} in {module}.",
    "The tests of {module} fail. Something is wrong with {function}.",
    "{module}: {function} does not do what its docstring says.",
)
WITHOUT_MODULE = (
    "{function} gives a wrong result.",
    "There is a bug in {function}. Please fix it.",
    "Since the last change {function} is wrong and a test fails.",
    "{function} does not do what its docstring says.",
)


@dataclass(frozen=True, slots=True)
class Bug:
    path: str
    function: str
    broken: str
    """The line as it is, without indentation. It stands once in its file."""
    fixed: str


@dataclass(frozen=True, slots=True)
class Instance:
    seed: int
    kind: BugKind
    files: dict[str, str]
    """Path to text: the modules and the visible test."""
    hidden_test: tuple[str, str]
    """Path and text."""
    issue: str
    names_module: bool
    """The issue says where the function is."""
    bug: Bug
    outcome: Outcome
    """Of the visible tests while the bug is there."""


@dataclass(frozen=True, slots=True)
class _Module:
    path: str
    functions: tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class _Broken:
    """The function with the bug, and what it does instead."""

    function: Function
    line: str
    formula: Formula | None
    """None: it returns nothing."""

    def result(self, case: Case) -> str | Value:
        """An exception as text, which is equal to no right value."""
        if self.formula is None:
            return None
        try:
            return self.formula.value(case)
        except NameError as error:
            return f"NameError: {error}"

    def differs(self, case: Case) -> bool:
        return self.result(case) != self.function.formula.value(case)

    def detail(self, case: Case) -> str:
        got = self.result(case)
        return got if isinstance(got, str) else unequal(self.function.formula.value(case), got)


def make_instance(seed: int) -> Instance:
    """The same for a seed everywhere and always. Seeds below 1_000_000 are for evaluation, all others for training."""
    random = Random(seed)
    kind = random.choice(tuple(BugKind))
    for _ in range(MAX_TRIES):
        instance = _try(random, seed, kind)
        if instance is not None:
            return instance
    raise AssertionError(f"no {kind} bug in {MAX_TRIES} tries from seed {seed}")


def _try(random: Random, seed: int, kind: BugKind) -> Instance | None:
    """None: what was drawn can't have such a bug, or it doesn't show, or its line stands twice."""
    broken_module = _draw_module(random, random.choice(SHAPES[kind]))
    broken = _break(random, kind, broken_module.functions[-1])
    cases = _telling_cases(random, broken) if broken is not None else None
    if broken is None or cases is None:
        return None
    functions = random.sample(broken_module.functions, len(broken_module.functions))
    text = "\n\n".join(function.text(broken.line if function is broken.function else None) for function in functions)
    if text.count(broken.line) != 1:
        return None
    others = [_draw_module(random) for _ in range(random.randint(1, 2))]
    modules = sorted([_Module(broken_module.path, tuple(functions)), *others], key=lambda module: module.path)
    if len({module.path for module in modules}) < len(modules):
        return None
    texts = {module.path: "\n\n".join(function.text() for function in module.functions) for module in modules}
    names_module = random.random() < 0.5
    title = _title(broken_module.path, broken.function)
    return Instance(
        seed=seed,
        kind=kind,
        files=texts | {broken_module.path: text, VISIBLE_TEST: _test_text(random, modules, broken, cases[:1])},
        hidden_test=(HIDDEN_TEST, _test_text(random, modules, broken, cases[1:])),
        issue=random.choice(WITH_MODULE if names_module else WITHOUT_MODULE).format(
            function=broken.function.name, module=broken_module.path
        ),
        names_module=names_module,
        bug=Bug(broken_module.path, broken.function.name, broken.line, broken.function.line()),
        outcome=Outcome(sum(len(module.functions) for module in modules), (Failure(title, broken.detail(cases[0])),)),
    )


def _draw_module(random: Random, last_shape: type[Formula] | None = None) -> _Module:
    """Two to four functions. Helpers come before their callers; nothing calls the last one."""
    shapes = [random.choice(ALL_SHAPES) for _ in range(random.choice((1, 1, 2)))] + [last_shape or random.choice(ALL_SHAPES)]
    functions = tuple(draw_functions(random, shapes))
    return _Module(f"{random.choice(WORDS)}.py", functions)


def _break(random: Random, kind: BugKind, function: Function) -> _Broken | None:
    formula = break_formula(random, kind, function)
    if formula is None:
        return None
    return _Broken(function, broken_line(kind, formula), None if kind is BugKind.MISSING_RETURN else formula)


def _telling_cases(random: Random, broken: _Broken) -> list[Case] | None:
    """Three different ones in which the bug shows."""
    cases: list[Case] = []
    for _ in range(20):
        case = draw_case(random, broken.function)
        if case not in cases and broken.differs(case):
            cases.append(case)
            if len(cases) == 3:
                return cases
    return None


def _title(path: str, function: Function) -> str:
    return f"{function.name} in {path}"


def _test_text(random: Random, modules: Sequence[_Module], broken: _Broken, cases: Sequence[Case]) -> str:
    """A unittest of all functions, with ``cases`` for the broken one."""
    imports = "".join(f"import {module.path.removesuffix('.py')}\n" for module in modules)
    tests = "\n".join(
        _method(module, function, cases if function is broken.function else [draw_case(random, function)])
        for module in modules
        for function in module.functions
    )
    return f"import unittest\n\n{imports}\n\nclass Test(unittest.TestCase):\n{tests}"


def _method(module: _Module, function: Function, cases: Sequence[Case]) -> str:
    name = f"{module.path.removesuffix('.py')}.{function.name}"
    lines = "".join(f"        self.assertEqual({name}({_listed(function, case)}), {function.formula.value(case)})\n" for case in cases)
    return f'    def test_{function.name}(self):\n        """{_title(module.path, function)}"""\n{lines}'


def _listed(function: Function, case: Case) -> str:
    return ", ".join(str(case[name]) for name in function.arguments)
