"""The state probe: a padded tail of ours leaves what one-token decode leaves; padded as prefill it leaves something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from baton.main import app
from engine.core import LoadedModel
from engine.probe import LANES, Lane, probe_tail
from tests.engine.engine_kit import KERNELS, MODEL, MakeCore, prompt, write_checkpoint

NUM_RECURRENT = MODEL["layers_block_type"].count("mamba")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def make_core(checkpoint: Path) -> MakeCore:
    return MakeCore(checkpoint)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("speculation", "num_tokens"), [(1, 17), (5, 2), (7, 33)])
def test_ours_is_bit_for_bit_one_token_decode_and_the_fault_is_not(
    make_core: MakeCore, kernels: str, speculation: int, num_tokens: int
) -> None:
    truth, ours, fault = probe_tail(make_core(kernels=kernels).loaded, prompt(num_tokens), speculation=speculation, max_tokens=8)
    assert truth.same
    assert ours.same
    assert ours.token_ids == truth.token_ids
    assert not any(difference.after_tail or difference.after_next for difference in ours.differences)
    assert not fault.same
    assert fault.token_ids[0] == truth.token_ids[0], "token N itself is computed rightly"
    by_part = {difference.part: difference for difference in fault.differences}
    states = [f"{part}.{layer}" for part in ("conv", "ssm") for layer in range(NUM_RECURRENT)]
    assert by_part.keys() == {*states, "hidden", "kv.0", "mtp_kv"}
    for part in states:
        assert by_part[part].after_tail > 0.01
        assert by_part[part].after_next > 0.01, "and the next token doesn't mend it"
    assert by_part["hidden"].after_tail > 0.01
    assert by_part["kv.0"].after_tail == 0, "KV belongs to positions: the tail's own are right"
    assert by_part["kv.0"].after_next > 0.01, "and the next one's is made from a wrong state"


def test_the_command_as_json(checkpoint: Path) -> None:
    told = probe("--model", str(checkpoint), "--tokens", "5,17,9,30", "--speculation", "3", "--json")
    assert told.exit_code == 0
    report: dict[str, Any] = json.loads(told.stdout)
    assert (report["prompt_tokens"], report["speculation"]) == (4, 3)
    assert [lane["name"] for lane in report["lanes"]] == list(LANES)
    assert [lane["same"] for lane in report["lanes"]] == [True, True, False]
    assert report["lanes"][1]["first_other_token"] is None


def test_the_command_as_a_table() -> None:
    """On the shipped model, which has text."""
    told = probe()
    assert told.exit_code == 0, told.output
    for words in ("conv window 0", "matrix state 1", "attention KV 0", "MTP's KV", "hidden tail", "bit for bit one-token decode"):
        assert words in told.output


def test_it_fails_when_ours_differs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loaded: LoadedModel, *args: Any, **options: Any) -> tuple[Lane, ...]:
        truth, _, fault = probe_tail(loaded, *args, **options)
        return truth, fault, fault

    monkeypatch.setattr("engine.probe.probe_tail", broken)
    told = probe("--model", str(checkpoint), "--tokens", "5,17,9")
    assert told.exit_code == 1
    assert "differs from one-token decode" in told.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "5"), "needs at least 2"),
        (("--tokens", "5,x"), "--tokens='5,x'"),
        (("--tokens", "5,4000"), "4000"),
        (("--tokens", "5,6", "--prompt", "hi"), "exclude each other"),
        (("--prompt", "hi"), "tokenizer.json"),
        (("--tokens", "5,6", "--kernels", "magic"), "kernels='magic'"),
    ],
)
def test_a_users_mistake_is_named(checkpoint: Path, args: tuple[str, ...], words: str) -> None:
    told = probe("--model", str(checkpoint), *args)
    assert told.exit_code == 2
    assert words in told.stderr


def probe(*args: str) -> Any:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["probe", "tail", *args])
