"""The process: what it says when it can't start, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from protocol.messages import Cancel
from router.__main__ import app
from tests.router.harness import FakeDecode, Script, within

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | {"PYTHONSAFEPATH": "1"}
START_S = 30.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "router", *arguments]


def fails(*arguments: str, **environment: str) -> str:
    """What it says on standard error. It exits with 2, without a traceback."""
    cleared: dict[str, str | None] = {key: None for key in os.environ if key.startswith("BATON_")}
    ended = CliRunner().invoke(app, arguments, env=cleared | environment, prog_name="baton-router")
    assert ended.exit_code == 2, ended.output
    assert isinstance(ended.exception, SystemExit)
    return ended.stderr


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_busy_ports_are_named(model_dir: Path) -> None:
    with taken_port() as port:
        told = fails("--model", str(model_dir), "--port", str(port), "--control", "tcp://127.0.0.1:0")
        assert f"port={port}" in told
        assert "in use" in told
        told = fails("--model", str(model_dir), "--port", "0", "--control", f"tcp://127.0.0.1:{port}")
        assert f"control='tcp://127.0.0.1:{port}'" in told
        assert "in use" in told


def test_wrong_settings_are_named(model_dir: Path, tmp_path: Path) -> None:
    assert "model is not set" in fails()
    assert "host is empty" in fails("--model", str(model_dir), "--host", "")
    assert "port=" in fails("--model", str(model_dir), "--port", "99999")
    assert "is not a directory" in fails("--model", str(tmp_path / "nowhere"))
    assert "config.json" in fails("--model", str(tmp_path))
    assert "queue_limit" in fails("--model", str(model_dir), BATON_QUEUE_LIMIT="-1")
    assert "BATON_QUEUE_LIMITS" in fails("--model", str(model_dir), BATON_QUEUE_LIMITS="1")
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h", "vocab_size": 320}')
    assert "tokenizer.json" in fails("--model", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in fails("--model", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h", "vocab_size": 5}')
    assert "vocab_size is 5" in fails("--model", str(tmp_path))


def test_help_names_every_option() -> None:
    told = CliRunner().invoke(app, ["--help"], prog_name="baton-router").stdout
    for option in ("--model", "--port", "--control", "--queue-limit", "--min-prefill", "--config"):
        assert option in told
    assert "Exit codes" in told


SIGNALS: list[tuple[list[signal.Signals], bool]] = [
    ([signal.SIGINT], True),
    ([signal.SIGTERM], False),
    ([signal.SIGTERM, signal.SIGTERM], True),
]


@pytest.mark.parametrize(("numbers", "at_once"), SIGNALS)
async def test_it_leaves_in_good_order(model_dir: Path, numbers: list[signal.Signals], at_once: bool) -> None:
    """Ctrl-C, and a second signal, end running requests with an error and tell their workers; SIGTERM lets them finish."""
    with taken_port() as port, taken_port() as control:
        pass  # both are free again
    address = f"tcp://127.0.0.1:{control}"
    arguments = command("--model", str(model_dir), "--port", str(port), "--control", address)
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:  # noqa: ASYNC220  (starting is quick)
        try:
            decode = FakeDecode(address, "d0")
            decode.script = lambda admit: Script([(20,), (21,), (22,)], "length", pause_s=0.3)
            await within(decode.join(), START_S)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, trust_env=False) as client:
                body = {"prompt": "hi", "stream": True, "max_tokens": 3}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    events = response.aiter_lines()
                    # the headers come with the first token
                    assert response.status_code == 200
                    await anext(events)
                    for number in numbers:
                        process.send_signal(number)
                        await asyncio.sleep(0.05)
                    rest = [line async for line in events if line]
            if at_once:
                assert json.loads(rest[-1][6:])["error"]["code"] == "stopping"
                assert "the server is stopping" in rest[-1]
                await decode.expect(Cancel)
            else:
                assert rest[-1] == "data: [DONE]"
            await decode.die()
            deadline = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)  # noqa: ASYNC251  (nobody else is on this loop any more)
            assert process.returncode == 0
        finally:
            process.kill()
