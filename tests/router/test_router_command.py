"""The process: what it says when it can't start, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from protocol.messages import Admit, Cancel
from router.__main__ import app
from tests.router.harness import PATIENCE_S, FakeDecode, within

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | {"PYTHONSAFEPATH": "1"}


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


async def says(process: asyncio.subprocess.Process, words: str) -> str:
    """The next line with these words."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stderr:
            if words in line.decode():
                return line.decode()
    raise AssertionError(f"it ended without a word of {words!r}")


async def first_token(decode: FakeDecode) -> Admit:
    admit = await decode.expect(Admit)
    await decode.admit(admit)
    await decode.tokens(admit.key, 0, (20,))
    return admit


@pytest.mark.parametrize(("numbers", "at_once"), SIGNALS)
async def test_it_leaves_in_good_order(model_dir: Path, numbers: list[signal.Signals], at_once: bool) -> None:
    """Ctrl-C, and a second signal, end running requests with an error and tell their workers; SIGTERM lets them finish."""
    arguments = command("--model", str(model_dir), "--port", "0", "--control", "tcp://127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(*arguments, stderr=asyncio.subprocess.PIPE, env=ENVIRONMENT)
    try:
        addresses = re.search(r"on (http\S+), workers dial (tcp\S+)", await says(process, "serving"))
        assert addresses is not None
        decode = FakeDecode(addresses[2], "d0")
        await decode.join()
        async with httpx.AsyncClient(base_url=addresses[1], timeout=PATIENCE_S, verify=False, trust_env=False) as client:
            answering = asyncio.create_task(first_token(decode))
            async with client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True, "max_tokens": 3}) as response:
                events = response.aiter_lines()
                assert response.status_code == 200
                await anext(events)
                admit = await answering
                for number in numbers:
                    process.send_signal(number)
                    await says(process, f"{number.name}: leaving")
                if not at_once:
                    await decode.tokens(admit.key, 1, (21, 22))
                    await decode.finish(admit.key, "length")
                rest = [line async for line in events if line]
        if at_once:
            assert json.loads(rest[-1][6:])["error"]["code"] == "stopping"
            assert "the server is stopping" in rest[-1]
            await decode.expect(Cancel)
        else:
            assert rest[-1] == "data: [DONE]"
        await decode.die()
        assert await within(process.wait()) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
