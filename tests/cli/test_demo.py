"""``baton demo`` with the shipped model: what it promises on the first screen of the README."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

import demo
from baton.demo import MAX_TOKENS, Asked, conclude
from engine import Engine, SamplingParams
from loadgen.record import Session, Turn
from tests.cli.terminal_kit import environment


def run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "baton", "demo", *args], capture_output=True, text=True, timeout=280, env=environment())


def test_an_agent_fixes_a_bug_it_has_never_seen_with_the_tokens_of_one_process() -> None:
    told = run_demo()
    assert told.returncode == 0, told.stdout + told.stderr
    calls = re.findall(r"^ +→ (\w+)", told.stdout, re.MULTILINE)
    assert {"test", "read", "replace", "submit"} <= set(calls)
    assert re.search(r"FAILED \w+ in \w+\.py: ", told.stdout), "the tests have really run"
    assert "OK: " in told.stdout
    handed = re.findall(r"handed over: h\((\d+)\) and its KV, (\d+) KiB, in D ([\d.]+) ms after prefill", told.stdout)
    kept = re.findall(r"(\d+) of (\d+) prompt tokens kept from the turns before", told.stdout)
    assert len(handed) + len(kept) >= len(calls)
    assert handed, "the first turn at least goes through the prefill worker"
    assert kept, "the next turns go on from it"
    assert all(int(position) > 0 and int(kib) > 0 for position, kib, _ in handed)
    assert all(0 < int(cached) < int(prompt) for cached, prompt in kept)
    assert "it passes, the bug is fixed" in told.stdout
    assert re.search(r"the same \d+ tokens", told.stdout)
    assert "\x1b" not in told.stdout, "colours are for terminals"


@pytest.fixture(scope="module")
def asked() -> Asked:
    """A short prompt and what one process makes of it."""
    prompt = [5, 6, 7]
    with Engine(demo.CHECKPOINT, threads=1) as engine:
        return prompt, list(engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))[0].token_ids)


def session(**more: Any) -> Session:
    turn = Turn(started_s=0.0, ttft_s=0.1, gaps_s=(), total_s=0.2, failure=more.pop("failure", None))
    return Session(name="28", turns=[turn], **more)


def test_only_a_fixed_bug_with_the_same_tokens_is_a_success(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(demo.CHECKPOINT, 28, session(resolved=True), [asked]) == 0
    assert "Next:" in capsys.readouterr().out
    assert conclude(demo.CHECKPOINT, 28, session(resolved=False), [asked]) == 1
    told = capsys.readouterr().out
    assert "it fails, the bug is still there; nothing was submitted in 1 turns" in told
    assert "Next:" not in told


def test_other_tokens_and_failed_requests_are_no_success(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, token_ids = asked
    assert conclude(demo.CHECKPOINT, 28, session(resolved=True), [(prompt, [*token_ids[:-1], 0])]) == 1
    assert "turn 1 differs" in capsys.readouterr().err
    assert conclude(demo.CHECKPOINT, 28, session(resolved=False, failure="http 500"), []) == 1
    assert "a request failed: http 500" in capsys.readouterr().err
