"""Run tests of a repository in a process of their own, with limits on CPU, memory, wall time, files and processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from loadgen.swe import run_tests as child
from loadgen.swe.outcome import Failure, Outcome, from_exception

WALL_S = 60.0
MAX_RESULT_BYTES = 1 << 20


def run_tests(files: Mapping[str, str], test_path: str, wall_s: float = WALL_S) -> Outcome:
    """Blocks. ``files`` go to a temporary directory that is gone afterwards, so nothing that tests do outlives them."""
    with tempfile.TemporaryDirectory(prefix="baton-swe-") as directory:
        for path, text in files.items():
            Path(directory, path).write_text(text, encoding="utf-8")
        return _outcome(*_run(directory, test_path, wall_s))


def _run(directory: str, test_path: str, wall_s: float) -> tuple[bytes | None, int]:
    """What the child told (None: not in time) and its return code."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", child.__file__, test_path, str(write_fd)],
            cwd=directory,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    try:
        told = _read(read_fd, time.monotonic() + wall_s)
    finally:
        os.close(read_fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it left behind
        code = process.wait()
    return told, code


def _read(fd: int, deadline: float) -> bytes | None:
    told = b""
    while len(told) < MAX_RESULT_BYTES:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        if not (some := os.read(fd, 1 << 16)):
            break
        told += some
    return told


def _outcome(told: bytes | None, code: int) -> Outcome:
    if told is None or (not told and code == -signal.SIGXCPU):
        return Outcome(1, (Failure("the tests", "they took too long"),))
    try:
        result = json.loads(told)
        failures = [Failure(title, from_exception(kind, text)) for title, kind, text in result["failures"]]
        return Outcome(int(result["num_tests"]), tuple(failures))
    except (ValueError, LookupError, TypeError, AttributeError):  # it ended before, or what it ran wrote there
        return Outcome(1, (Failure("the tests", "their process died"),))
