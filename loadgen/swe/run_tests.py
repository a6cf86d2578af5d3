"""Run one unittest file of the working directory under limits: the child's side of loadgen.swe.sandbox.

``python -I -S -B run_tests.py TEST_FILE RESULT_FD``. Imports the standard library only. The limits are against accidents: code that
means harm can get around an audit hook.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import unittest

CPU_S = 5
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
MAX_MESSAGE = 2000
FORBIDDEN = (
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.kill",
    "subprocess.Popen",
    "socket.",
    "ctypes.",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "shutil.")


class Result(unittest.TestResult):
    """Title, exception type and message of every test that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str, str]] = []

    def addFailure(self, test, err) -> None:  # type: ignore[no-untyped-def]
        self.told.append(_tell(test.shortDescription() or test.id().rpartition(".")[2], err[1]))

    addError = addFailure

    def addSubTest(self, test, subtest, err) -> None:  # type: ignore[no-untyped-def]
        if err is not None:
            self.addFailure(test, err)


def main(test_file: str, result_fd: int) -> None:
    home = os.getcwd()
    result = Result()
    num_tests = 1
    _limit(home)
    sys.path.insert(0, home)
    try:
        suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(test_file.removesuffix(".py")))
        num_tests = suite.countTestCases()
        suite.run(result)
    except BaseException as error:  # SystemExit of what is tested included
        result.told.append(_tell(test_file, error))
    with os.fdopen(result_fd, "w") as file:
        json.dump({"num_tests": num_tests, "failures": result.told}, file)


def _limit(home: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & WRITES
        else:
            path, writes = arguments[0] if arguments else "", event.startswith(CHANGES)
        if writes and isinstance(path, str | bytes) and not _inside(os.fsdecode(path), home):
            raise PermissionError("writing outside the repository is not allowed")

    sys.addaudithook(refuse)


def _inside(path: str, home: str) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(home) + os.sep)


def _tell(title: str, error: BaseException) -> tuple[str, str, str]:
    return title, type(error).__name__, str(error)[:MAX_MESSAGE]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
