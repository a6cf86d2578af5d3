"""Foreign policies get in by their explicit setting alone, and nobody can overlook them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.main import app
from engine.policies import OURS, load_policies
from engine.serving import load_core
from protocol.config import DecodeSettings, PrefillSettings, load_settings
from protocol.errors import ConfigError
from tests.engine.engine_kit import write_checkpoint
from tests.reproductions.padded_tail import ZEROS

PADDED_TAIL = "tests.reproductions.padded_tail:ZEROS"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_ours_are_the_default() -> None:
    assert load_policies(None) is OURS
    assert load_policies(PADDED_TAIL) is ZEROS


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("somewhere", "module:attribute"),
        (":POLICIES", "module:attribute"),
        ("tests.reproductions.padded_tail:", "module:attribute"),
        ("no.such.module:POLICIES", "No module named 'no'"),
        ("tests.reproductions.padded_tail:NOTHING", "NOTHING"),
        ("tests.reproductions.padded_tail:PaddedRow", "that is a type"),
    ],
)
def test_what_is_no_policies_is_refused_with_the_reason(checkpoint: Path, where: str, words: str) -> None:
    settings = DecodeSettings(model=checkpoint, kernels="torch", policies=where)
    with pytest.raises(ConfigError, match=words) as told:
        load_core(settings)
    assert f"policies={where!r}" in str(told.value)
    told_by_command = CliRunner().invoke(app, ["generate", "hi", "--model", str(checkpoint), "--policies", where])
    assert told_by_command.exit_code == 2
    assert words in told_by_command.output


@pytest.mark.parametrize("cls", [DecodeSettings, PrefillSettings])
def test_they_are_a_setting_that_help_does_not_show(cls: type[DecodeSettings]) -> None:
    settings = load_settings(cls, "decode", {"model": "/m"}, None, {"BATON_POLICIES": PADDED_TAIL})
    assert settings.policies == PADDED_TAIL
    assert "policies" not in CliRunner().invoke(app, ["generate", "--help"]).output
