"""What a wrong start says, and how processes leave."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import decode_worker.__main__
import prefill_worker.__main__
from protocol.config import DecodeSettings, PrefillSettings
from protocol.flags import settings_app
from tests.system.cluster_kit import START_S, Answer, Cluster, complete, free_port, launch, stream

LEFT_AT_ONCE, WRONG_SETTING, UNWELCOME = 1, 2, 3


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def _sigint_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_as_before")
def test_wrong_starts_end_with_the_reason(model: Path, tmp_path: Path, taken_port: int) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other_type = tmp_path / "llama"
    other_type.mkdir()
    (other_type / "config.json").write_text('{"model_type": "llama"}')
    truncated = tmp_path / "truncated"
    shutil.copytree(model, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    process = launch("decode_worker", tmp_path, "truncated", "--model", str(truncated))
    for role, words, args in (
        ("prefill", "nowhere", ("--model", str(tmp_path / "nowhere"))),
        ("decode", "empty/config.json", ("--model", str(empty))),
        ("prefill", "model_type='llama'", ("--model", str(other_type))),
        ("decode", "truncated/model.safetensors", ("--model", str(truncated))),
        ("prefill", "threads='many'", ("--model", str(model), "--threads", "many")),
        ("decode", "max_model_len=99999", ("--model", str(model), "--max-model-len", "99999")),
        ("decode", "control='here'", ("--model", str(model), "--control", "here")),
        ("prefill", "model is not set", ()),
        ("prefill", f":{taken_port}", ("--model", str(model), "--peer-port", str(taken_port))),
    ):
        assert words in refusal(role, *args)
    assert process.wait() == WRONG_SETTING, process.text()
    assert "truncated/model.safetensors" in process.text()
    assert "Traceback" not in process.text()


COMMANDS = {
    "prefill": settings_app("baton-prefill", "", PrefillSettings, "prefill", prefill_worker.__main__.start),
    "decode": settings_app("baton-decode", "", DecodeSettings, "decode", decode_worker.__main__.start),
}


def refusal(role: str, *args: str) -> str:
    """What the command says on standard error in this process, which has torch already. It ends with 2 and without a traceback."""
    ended = CliRunner().invoke(COMMANDS[role], args, env={key: None for key in os.environ if key.startswith("BATON_")})
    assert ended.exit_code == WRONG_SETTING, ended.output
    assert isinstance(ended.exception, SystemExit)
    return ended.stderr


def test_without_a_router_they_keep_dialing_and_leave_when_told(model: Path, tmp_path: Path) -> None:
    control = f"tcp://127.0.0.1:{free_port()}"
    started = [launch(f"{role}_worker", tmp_path, role, "--model", str(model), "--control", control) for role in ("prefill", "decode")]
    for process, number in zip(started, (signal.SIGTERM, signal.SIGINT), strict=True):
        process.until_says(f"no answer from the router at {control}")
        process.send(number)
        assert process.wait() == 0


def test_a_worker_with_another_model_is_sent_away(cluster: Cluster, other_model: Path) -> None:
    cluster.use_speculation()
    more = ("--model", str(other_model), "--control", cluster.control)
    for process in [launch(f"{role}_worker", cluster.folder, f"strange-{role}", *more) for role in ("decode", "prefill")]:
        assert process.wait(START_S) == UNWELCOME, process.text()
        assert "weights_digest" in process.text()
    cluster.until_ready(1, 1)


async def test_a_told_worker_finishes_its_streams_before_it_leaves(cluster: Cluster) -> None:
    """SIGTERM at the only decode worker, in the middle of a stream: the stream goes on to its end, new requests wait for another."""
    cluster.use_speculation()
    answer = Answer()
    async with cluster.client() as client:
        async for answer in stream(client, [71] * 30, max_tokens=200, ignore_eos=True):
            if answer.token_ids and "d" in cluster.processes:
                process = cluster.processes.pop("d")
                process.send(signal.SIGTERM)
        assert answer.error is None
        assert len(answer.token_ids) == 200
        assert answer.finish_reason == "length"
        assert await asyncio.to_thread(process.wait) == 0
        assert "left" in process.text()
        cluster.use_speculation()
        assert len((await complete(client, [72] * 30, max_tokens=4, ignore_eos=True))["token_ids"]) == 4
    cluster.until_whole()


async def test_the_second_signal_does_not_wait(cluster: Cluster) -> None:
    cluster.use_speculation()
    process = cluster.processes.pop("d")
    answer = Answer()
    async with cluster.client() as client:
        async for answer in stream(client, [73] * 30, max_tokens=3000, ignore_eos=True):
            if answer.token_ids and process.popen.poll() is None:
                process.send(signal.SIGTERM)
                process.until_says("draining")
                process.send(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait) == LEFT_AT_ONCE
    assert answer.error is not None
    assert answer.finish_reason is None
    cluster.use_speculation()
    cluster.until_whole()
