"""``baton bench swe``, ``serve`` and ``compare`` through their real doors: a process, a server on a socket, a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.swe.instance import Instance
from tests.loadgen.expert_server import PATIENCE_S, ExpertServer, serving

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | {
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
    "OMP_NUM_THREADS": "1",
}


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "baton", "bench", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)


def bench(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    process = start(*args)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


InProcess = Callable[..., tuple[int, str]]


@pytest.fixture
def in_process() -> InProcess:
    """Without a process for each: exit code and all that was written."""
    from typer.testing import CliRunner

    from baton.main import app

    def run(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ("bench", *args))
        return result.exit_code, result.output

    return run


def test_swe_tells_what_was_resolved_and_draws_it(tmp_path: Path, in_process: InProcess) -> None:
    plot, record = tmp_path / "load.svg", tmp_path / "sessions.jsonl"
    with serving(ExpertServer(range(5, 7))) as server:
        options = ("--url", f"{server.url}/v1", "--instances", "2", "--seed", "5", "--slo-ttft", "60000")
        code, out, err = bench("swe", *options, "--json", "--plot", str(plot), "--record", str(record))
        assert code == 0, err
        told = json.loads(out)
        assert (told["resolved"], told["instances"], told["accuracy"], told["failures"]) == (2, 2, 1.0, {})
        assert [session["name"] for session in told["sessions"]] == ["5", "6"]
        assert told["goodput"]["good"] == told["requests"]
        assert "<svg" in plot.read_text()
        code, out = in_process("swe", "--url", server.url, "--sessions-file", str(record))
    assert (code, "resolved" in out) == (0, False), out


def test_serve_shows_a_table(tmp_path: Path, in_process: InProcess) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n{"prompt": "two"}\n')
    with serving(ExpertServer(())) as server:
        options = ("--requests", "3", "--arrival", "poisson", "--rate", "100", "--prompts-file", str(prompts))
        code, out = in_process("serve", "--url", server.url, *options)
    assert code == 0, out
    assert [body["prompt"] for body in server.bodies] == ["one", "two", "one"]
    assert "time to first token" in out
    assert "6, " in out, "output tokens"


def test_ctrl_c_tells_what_there_is() -> None:
    def second_hangs(instance: Instance, number: int) -> str | None:
        return "hang" if instance.seed == 1 else None

    with serving(ExpertServer(range(3), second_hangs)) as server:
        process = start("swe", "--url", server.url, "--instances", "3", "--concurrency", "1", "--json")
        assert server.hanging.wait(PATIENCE_S), "the first session has ended and the second waits"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    told = json.loads(out)
    assert (told["resolved"], told["instances"], told["sessions_asked"], told["interrupted"]) == (1, 1, 3, True)
    assert err == ""


def test_nothing_answered_is_a_failure(in_process: InProcess) -> None:
    with serving(ExpertServer(range(2), lambda instance, number: "500")) as server:
        code, out = in_process("swe", "--url", server.url, "--instances", "2")
    assert code == 1
    assert "http 500 2" in out


def test_its_own_cluster_has_token_ids_that_can_be_compared(tmp_path: Path, in_process: InProcess) -> None:
    small = ("--instances", "2", "--max-turns", "2", "--max-tokens", "24", "--threads", "1")
    code, out, err = bench("swe", *small, "--speculation", "5", "--json", "--tokens")
    assert code == 0, err
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(out)
    code, told = in_process("compare", str(one), str(one))
    assert (code, told.partition(":")[0]) == (0, "the same")
    changed: dict[str, Any] = json.loads(out)
    assert changed["tokens_per_step"] >= 1, "it drafted"
    changed["sessions"][1]["turns"][0]["token_ids"][0] += 1
    other.write_text(json.dumps(changed))
    code, told = in_process("compare", str(one), str(other))
    assert code == 1
    assert "1 of 2 sessions; the first: session 1: turn 1, token 0" in told


def test_reports_of_two_loads_are_not_compared(tmp_path: Path, in_process: InProcess) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with serving(ExpertServer(())) as server:
        for load, file in (("serve", one), ("fewshot", other)):
            code, out = in_process(load, "--url", server.url, "--json", "--tokens", "--requests" if load == "serve" else "--questions", "1")
            assert code == 0, out
            file.write_text(out)
    code, told = in_process("compare", str(one), str(other))
    assert code == 2
    assert "same load: load is 'bench serve' in one and 'bench fewshot' in the other" in told


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("swe", "--rate", "3"), "--arrival poisson"),
        (("swe", "--arrival", "poisson"), "--rate"),
        (("swe", "--url", "http://127.0.0.1:9", "--speculation", "3"), "--speculation"),
        (("swe", "--model-name", "m"), "--url"),
        (("swe", "--sessions-file", "/nowhere"), "sessions_file=/nowhere"),
        (("swe", "--seed", "999999"), "for training"),
        (("swe", "--plot", "load.txt"), ".svg"),
        (("swe", "--model", "/nowhere"), "model=/nowhere"),
        (("serve", "--prompts-file", "/nowhere"), "prompts_file=/nowhere"),
        (("compare", "/nowhere", "/nowhere"), "/nowhere"),
    ],
)
def test_a_users_mistake_is_named(args: tuple[str, ...], named: str, in_process: InProcess) -> None:
    code, err = in_process(*args)
    assert code == 2
    assert named in err


def test_no_server_is_one_line(in_process: InProcess) -> None:
    code, err = in_process("swe", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "no server at http://127.0.0.1:9" in err
    assert "Traceback" not in err
