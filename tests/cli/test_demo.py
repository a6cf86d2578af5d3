"""``baton demo`` with the shipped model: what it promises on the first screen of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.cli.terminal_kit import environment, scrambled_model


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "baton", "demo", *args], capture_output=True, text=True, timeout=250, env=environment())


def test_an_agent_fixes_a_bug_it_has_never_seen_with_the_tokens_of_one_process() -> None:
    told = demo()
    assert told.returncode == 0, told.stdout + told.stderr
    calls = re.findall(r"^ +→ (\w+)", told.stdout, re.MULTILINE)
    assert {"test", "read", "replace", "submit"} <= set(calls)
    assert re.search(r"FAILED \w+ in \w+\.py: ", told.stdout), "the tests have really run"
    assert "OK: " in told.stdout
    handed = re.findall(r"handed over: h\((\d+)\) and its KV, (\d+) KiB, in D ([\d.]+) ms after prefill", told.stdout)
    assert len(handed) >= len(calls)
    assert all(int(position) > 0 and int(kib) > 0 for position, kib, _ in handed)
    assert "it passes, the bug is fixed" in told.stdout
    assert re.search(r"the same \d+ tokens", told.stdout)
    assert "\x1b" not in told.stdout, "colours are for terminals"


def test_a_model_that_can_not_fix_it_is_told_so_by_the_exit_code(tmp_path: Path) -> None:
    told = demo("--model", str(scrambled_model(tmp_path / "model")), "--max-turns", "1")
    assert told.returncode == 1
    assert "it fails, the bug is still there; nothing was submitted in 1 turns" in told.stdout
    assert re.search(r"the same \d+ tokens", told.stdout), "what can't be fixed is still the same everywhere"
    assert "Next:" not in told.stdout
