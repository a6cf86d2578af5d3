"""A process's command line: one flag per setting, the same words for a wrong value wherever it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.config import HIDDEN, DecodeSettings, PrefillSettings
from protocol.flags import settings_app


class Ran:
    def __init__(self) -> None:
        self.settings: DecodeSettings | None = None

    def run(self, settings: DecodeSettings) -> int:
        self.settings = settings
        return 0


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("MODEL", "CONFIG", "SPECULATION", "THREADS"):
        monkeypatch.delenv(f"BATON_{key}", raising=False)


def invoke(*args: str) -> tuple[int, str, DecodeSettings | None]:
    ran = Ran()
    result = CliRunner().invoke(settings_app("baton-decode", "About it.", DecodeSettings, "decode", ran.run), args)
    return result.exit_code, result.output, ran.settings


def test_flags_win_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "/from/file"\n[decode]\nspeculation = 1\nthreads = 1\nmax_running = 3\n')
    monkeypatch.setenv("BATON_SPECULATION", "2")
    monkeypatch.setenv("BATON_THREADS", "2")
    code, _, settings = invoke("--config", str(file), "--threads", "4", "--no-checksums", "--tail-padding", "always")
    assert code == 0
    assert settings is not None
    assert settings.model == Path("/from/file")
    assert (settings.max_running, settings.speculation, settings.threads) == (3, 2, 4)
    assert not settings.checksums
    assert settings.tail_padding == "always"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "model is not set: give --model, BATON_MODEL"),
        (("--model", "/m", "--speculation", "9"), "speculation='9' (from --speculation) is not possible"),
        (("--model", "/m", "--threads", "many"), "threads='many' (from --threads)"),
        (("--model", "/m", "--kernels", "fast"), "kernels='fast' (from --kernels)"),
        (("--model", "/m", "--control", "somewhere"), "control='somewhere' (from --control)"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
    ],
)
def test_wrong_values_end_with_one_line(args: tuple[str, ...], words: str) -> None:
    code, output, settings = invoke(*args)
    assert code == 2
    assert settings is None
    assert output.startswith("baton-decode: ")
    assert output.count("\n") == 1
    assert words in output


def test_an_unknown_flag_is_refused() -> None:
    code, output, _ = invoke("--model", "/m", "--treads", "2")
    assert code == 2
    assert "--treads" in output


@pytest.mark.parametrize("cls", [DecodeSettings, PrefillSettings])
def test_every_setting_has_a_flag_with_help(cls: type[DecodeSettings]) -> None:
    assert all(field.description for field in cls.model_fields.values())
    result = CliRunner(env={"COLUMNS": "200"}).invoke(settings_app("x", "About it.", cls, "decode", lambda _: 0), ["--help"])
    assert result.exit_code == 0
    for key, field in cls.model_fields.items():
        assert (f"--{key.replace('_', '-')}" in result.output) == (HIDDEN not in field.metadata)
