"""Tools answer every call with a text, tests run under limits, and what the expert says is what really comes out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from loadgen.swe.outcome import from_exception
from loadgen.swe.sandbox import run_tests
from loadgen.swe.tools import TOOLS, Workspace

TEST = (
    "import unittest\n\nimport shop\n\n\nclass Test(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(shop.one(), 1)\n"
)


def outcome_of(module: str, wall_s: float = 60.0) -> str:
    return run_tests({"shop.py": module, "test_visible.py": TEST}, "test_visible.py", wall_s).text()


def function(*lines: str) -> str:
    return "def one():\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize("seed", range(1_000_000, 1_000_012))
def test_the_expert_says_what_really_comes_out(seed: int) -> None:
    instance = make_instance(seed)
    assert expert_messages(instance) == expert_messages(instance, run_tests)


@pytest.mark.parametrize("seed", range(4))
def test_the_hidden_test_decides(seed: int) -> None:
    instance = make_instance(seed)
    workspace = Workspace(instance.files)
    assert not workspace.resolved(instance)
    fix = {"path": instance.bug.path, "old": instance.bug.broken, "new": instance.bug.fixed}
    assert workspace.run("replace", json.dumps(fix)) == "replaced"
    assert workspace.resolved(instance)
    assert instance.hidden_test[0] not in workspace.files, "an agent never sees it"


def test_changing_the_visible_test_resolves_nothing() -> None:
    instance = make_instance(3)
    workspace = Workspace(instance.files)
    test = instance.files["test_visible.py"]
    workspace.run(
        "replace", json.dumps({"path": "test_visible.py", "old": test, "new": TEST.replace("import shop", "").replace("shop.one()", "1")})
    )
    assert workspace.run("test", "{}") == "OK: 1 test passed"
    assert not workspace.resolved(instance)


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("list", "", "shop.py\ntest_visible.py"),
        ("read", '{"path": "shop.py"}', function("return 1")),
        ("read", '{"path": "shop.py", "function": "one"}', function("return 1").rstrip()),
        ("read", '{"path": "shop.py", "function": "two"}', "error: there is no function 'two' in shop.py"),
        ("read", '{"path": "shop.py", "function": 1}', "error: read needs function, a string"),
        ("read", '{"path": "../../etc/passwd"}', "error: there is no file '../../etc/passwd'"),
        ("read", '{"path": 5}', "error: read needs path, a string"),
        ("read", '{"path": "sh', "error: the arguments are not JSON"),
        ("read", '["shop.py"]', "error: the arguments are not an object"),
        ("replace", '{"path": "shop.py", "old": "n", "new": "m"}', "error: old occurs 2 times in shop.py, not once"),
        ("replace", '{"path": "shop.py", "old": "", "new": "m"}', "error: old occurs 0 times in shop.py, not once"),
        ("replace", '{"path": "shop.py", "old": "one"}', "error: replace needs new, a string"),
        ("replace", '{"path": "shop.py", "old": "1", "new": "\\ud800"}', "error: new is not Unicode"),
        ("bash", "{}", "error: there is no tool 'bash'"),
        ("test", "{}", "OK: 1 test passed"),
        ("submit", "{}", "submitted"),
    ],
)
def test_every_call_is_answered(name: str, arguments: str, answer: str) -> None:
    assert Workspace({"shop.py": function("return 1"), "test_visible.py": TEST}).run(name, arguments) == answer


def test_tools_are_described_as_the_api_wants_it() -> None:
    assert [tool["function"]["name"] for tool in TOOLS] == ["list", "read", "replace", "test", "submit"]
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in TOOLS)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (function("return 2"), "FAILED test_one: expected 1, got 2"),
        (function("return one_more"), "FAILED test_one: NameError: name 'one_more' is not defined"),
        ("def one(:", "FAILED test_visible.py: SyntaxError: invalid syntax (shop.py, line 1)"),
        ("raise SystemExit(3)", "FAILED test_visible.py: SystemExit: 3"),
        (function("import os", "os._exit(0)"), "FAILED the tests: their process died"),
        (function("return bytearray(1 << 33)"), "FAILED test_one: MemoryError"),
        (function("import os", "return os.fork()"), "FAILED test_one: PermissionError: os.fork is not allowed here"),
        (function("import os", "return os.system('true')"), "FAILED test_one: PermissionError: os.system is not allowed here"),
        (function("import socket", "return socket.socket()"), "FAILED test_one: PermissionError: socket.__new__ is not allowed here"),
        (function("open('inside', 'w').close()", "return 1"), "OK: 1 test passed"),
    ],
)
def test_what_code_does_is_told_in_a_line(module: str, told: str) -> None:
    assert outcome_of(module).splitlines()[0] == told


def test_an_infinite_loop_ends() -> None:
    assert outcome_of(function("while True: pass"), wall_s=0.7) == "FAILED the tests: they took too long\n1 of 1 test failed"


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "out"
    told = outcome_of(function(f"open({str(target)!r}, 'w').close()", "return 1"))
    assert "PermissionError: writing outside the repository is not allowed" in told
    assert not target.exists()


def test_files_have_a_largest_size() -> None:
    assert "OSError: [Errno 27] File too large" in outcome_of(function("open('big', 'w').write('x' * (2 << 20))", "return 1"))


def test_no_directory_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome_of(function("open('inside', 'w').close()", "return 1"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "message", "detail"),
    [
        ("AssertionError", "7 != 12", "expected 12, got 7"),
        ("AssertionError", "Lists differ: [1] != [1, 2]\n\nFirst", "expected [1, 2], got [1]"),
        ("AssertionError", "nothing like it", "AssertionError: nothing like it"),
        ("KeyError", "'a != b'", "KeyError: 'a != b'"),
        ("ValueError", "x" * 999, "ValueError: " + "x" * 148),
    ],
)
def test_exceptions_take_one_short_line(kind: str, message: str, detail: str) -> None:
    assert from_exception(kind, message) == detail
