"""Instances: the same for a seed, broken where they say so, and solvable."""

from __future__ import annotations

import builtins
import keyword
import sys
import types
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.swe.bugs import BugKind
from loadgen.swe.instance import Instance, make_instance
from loadgen.swe.outcome import Outcome
from loadgen.swe.words import WORDS

SEEDS = st.integers(0, 2**40)


def run_in_process(files: dict[str, str], test_path: str) -> Counter[str]:
    """Names of tests that fail, and how many there are, without a process for each run."""
    modules: dict[str, types.ModuleType] = {}
    for path, text in files.items():
        if not path.startswith("test_"):
            module = types.ModuleType(path.removesuffix(".py"))
            exec(compile(text, path, "exec"), module.__dict__)
            modules[module.__name__] = module
    sys.modules.update(modules)
    try:
        namespace: dict[str, object] = {}
        exec(compile(files[test_path], test_path, "exec"), namespace)
    finally:
        for name in modules:
            del sys.modules[name]
    case = namespace["Test"]
    assert isinstance(case, type)
    results: Counter[str] = Counter()
    for name in vars(case):
        if name.startswith("test_"):
            results["tests"] += 1
            try:
                getattr(case(name), name)()
            except (AssertionError, NameError):
                results[name] += 1
    return results


def fixed(instance: Instance) -> dict[str, str]:
    text = instance.files[instance.bug.path]
    assert text.count(instance.bug.broken) == 1, "an agent can name the broken line"
    return instance.files | {instance.bug.path: text.replace(instance.bug.broken, instance.bug.fixed)}


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_both_tests_fail_with_the_bug_and_pass_with_the_fix(seed: int) -> None:
    instance = make_instance(seed)
    path, text = instance.hidden_test
    bad = f"test_{instance.bug.function}"
    num_tests = instance.outcome.num_tests
    for files, expected in ((instance.files, {"tests": num_tests, bad: 1}), (fixed(instance), {"tests": num_tests})):
        assert run_in_process(files, "test_visible.py") == expected
        assert run_in_process(files | {path: text}, path) == expected


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_a_seed_says_everything(seed: int) -> None:
    assert make_instance(seed) == make_instance(seed)


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_hidden_tests_use_other_numbers(seed: int) -> None:
    instance = make_instance(seed)
    call = f"{instance.bug.path.removesuffix('.py')}.{instance.bug.function}("
    (seen,) = [line for line in instance.files["test_visible.py"].splitlines() if call in line]
    assert seen not in instance.hidden_test[1].splitlines()


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_the_issue_names_the_function_and_sometimes_the_module(seed: int) -> None:
    instance = make_instance(seed)
    assert instance.bug.function in instance.issue
    assert (instance.bug.path in instance.issue) == instance.names_module
    assert instance.bug.path in instance.outcome.text()


def test_all_kinds_come_up_alike() -> None:
    kinds = Counter(make_instance(seed).kind for seed in range(300))
    assert set(kinds) == set(BugKind)
    assert min(kinds.values()) > 30


def test_seeds_give_different_repositories() -> None:
    assert len({str(make_instance(seed).files) for seed in range(300)}) == 300


def test_no_word_means_something_to_python() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert not set(WORDS) & {*sys.stdlib_module_names, *keyword.kwlist, *keyword.softkwlist, *dir(builtins), "i", "unittest"}


@pytest.mark.parametrize(("outcome", "text"), [(Outcome(1, ()), "OK: 1 test passed"), (Outcome(7, ()), "OK: 7 tests passed")])
def test_outcomes_count_in_english(outcome: Outcome, text: str) -> None:
    assert outcome.text() == text
