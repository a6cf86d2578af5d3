"""Where settings come from, who wins, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.config import EngineConfig
from protocol.config import (
    ENGINE_KEYS,
    SETTINGS,
    DecodeSettings,
    PrefillSettings,
    Process,
    RouterSettings,
    Settings,
    UpSettings,
    WorkerSettings,
    load_settings,
)
from protocol.errors import ConfigError

MODEL = {"model": "/models/m"}


def load(process: Process = "decode", flags: dict[str, Any] | None = None, file: Path | None = None, **environ: str) -> Any:
    return load_settings(SETTINGS[process], process, MODEL if flags is None else flags, file, environ)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return path

    return write


def test_flags_win_over_environment_over_file_over_defaults(write: Any) -> None:
    path = write("max_running = 2\nkv_blocks = 20\nstep_tokens = 200\n")
    settings = load(flags=MODEL | {"max_running": 4, "kv_blocks": None}, file=path, BATON_MAX_RUNNING="3", BATON_KV_BLOCKS="30")
    assert (settings.max_running, settings.kv_blocks, settings.step_tokens, settings.max_prefill_chunk) == (4, 30, 200, 256)


def test_a_process_table_wins_over_the_top_and_stays_with_its_process(write: Any) -> None:
    path = write("kv_blocks = 20\n[decode]\nkv_blocks = 50\nspeculation = 3\n[prefill]\nlease_s = 5\n")
    assert load("decode", file=path).kv_blocks == 50
    assert load("decode", file=path).speculation == 3
    assert load("prefill", file=path).kv_blocks == 20
    assert load("prefill", file=path).lease_s == 5.0


def test_one_file_serves_all_processes(write: Any) -> None:
    path = write('model = "m"\nport = 9000\nkv_blocks = 20\nlease_s = 3.5\n[baton]\nprefill = 2\ndecode = 3\n')
    assert load("router", {}, path).port == 9000
    assert load("prefill", {}, path).lease_s == 3.5
    assert load("decode", {}, path).kv_blocks == 20
    up = load("baton", {}, path)
    assert (up.prefill, up.decode, up.port) == (2, 3, 9000)


def test_keys_of_other_processes_in_the_environment_are_left_alone() -> None:
    assert load("router", BATON_KV_BLOCKS="5", BATON_PREFILL="2").port == 8000


def test_an_empty_variable_counts_as_unset() -> None:
    assert load(BATON_KV_BLOCKS="").kv_blocks is None


def test_the_file_may_be_named_in_the_environment(write: Any) -> None:
    assert load(BATON_CONFIG=str(write("max_running = 7\n"))).max_running == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_block = 5\n", "unknown key 'kv_block' in .*baton.toml; did you mean 'kv_blocks'"),
        ("[decode]\nspeculatoin = 3\n", r"unknown key 'speculatoin' in .*\[decode\]; did you mean 'speculation'"),
        ("[router]\nkv_blocks = 3\n", r"unknown key 'kv_blocks' in .*\[router\]"),
        ("[decoder]\nkv_blocks = 3\n", r"unknown table \[decoder\]; did you mean 'decode'"),
        ("xyzzy = 1\n", "unknown key 'xyzzy' in .*baton.toml$"),
        ("port = \n", "not valid TOML"),
    ],
)
def test_what_nobody_knows_in_a_file_is_named(write: Any, text: str, message: str) -> None:
    for process in SETTINGS:
        with pytest.raises(ConfigError, match=message):
            load(process, file=write(text))


def test_what_nobody_knows_elsewhere_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown key 'BATON_KVBLOCKS' in the environment; did you mean 'BATON_KV_BLOCKS'"):
        load("router", BATON_KVBLOCKS="5")
    with pytest.raises(ConfigError, match="unknown key 'speculate' in the command line"):
        load(flags=MODEL | {"speculate": 3})


@pytest.mark.parametrize(
    ("process", "environ", "message"),
    [
        ("decode", {"BATON_SPECULATION": "8"}, r"speculation='8' \(from BATON_SPECULATION\) is not possible: .*7"),
        ("decode", {"BATON_KV_BLOCKS": "many"}, r"kv_blocks='many' \(from BATON_KV_BLOCKS\) is not possible: .*integer"),
        ("decode", {"BATON_TAIL_PADDING": "perhaps"}, "tail_padding='perhaps' .*'auto', 'always' or 'never'"),
        ("router", {"BATON_PORT": "70000"}, "port='70000' .*65535"),
        ("router", {"BATON_CONTROL": "127.0.0.1:5550"}, "control='127.0.0.1:5550' .*tcp://"),
        ("prefill", {"BATON_LEASE_S": "0"}, "lease_s='0' .*greater than 0"),
        ("prefill", {"BATON_LEASE_S": "inf"}, "lease_s='inf'"),
        ("prefill", {"BATON_CHECKSUMS": "maybe"}, "checksums='maybe'"),
        ("baton", {"BATON_DECODE": "0"}, "decode='0' .*greater than or equal to 1"),
    ],
)
def test_impossible_values_are_named_with_their_source(process: Process, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(SETTINGS[process], process, MODEL, None, environ)


def test_true_is_no_number(write: Any) -> None:
    with pytest.raises(ConfigError, match=r"port=True .* isn't a yes-or-no setting"):
        load("router", file=write("port = true\n"))
    assert load("prefill", file=write("checksums = false\n")).checksums is False
    assert load("prefill", BATON_MTP="yes").mtp is True


@pytest.mark.parametrize("process", ["router", "prefill", "decode"])
def test_a_missing_model_is_asked_for(process: Process) -> None:
    with pytest.raises(ConfigError, match="model is not set: give --model, BATON_MODEL or model in the config file"):
        load(process, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read config file .*absent.toml: No such file"):
        load(file=tmp_path / "absent.toml")


@pytest.mark.parametrize("cls", list(SETTINGS.values()))
def test_settings_are_frozen(cls: type[Settings]) -> None:
    settings = cls.model_validate(MODEL)
    with pytest.raises(ValidationError):
        settings.log_level = "debug"  # type: ignore[misc]


def test_a_key_means_the_same_type_everywhere() -> None:
    for key in set(RouterSettings.model_fields) & set(WorkerSettings.model_fields) | set(ENGINE_KEYS):
        kinds = {
            str(cls.model_fields[key].annotation) for cls in (RouterSettings, PrefillSettings, DecodeSettings) if key in cls.model_fields
        }
        assert len(kinds) == 1, key


def test_worker_keys_are_the_engines_with_the_engines_defaults() -> None:
    engine = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "dtype")}
    assert set(ENGINE_KEYS) == {"model", *engine}
    for key, default in engine.items():
        assert DecodeSettings.model_fields[key].default == default, key
        assert key not in PrefillSettings.model_fields or PrefillSettings.model_fields[key].default == default


def test_workers_make_engine_configs() -> None:
    for cls in (PrefillSettings, DecodeSettings):
        assert EngineConfig(**cls(model=Path("m")).engine_values()) == EngineConfig(model=Path("m"))
    assert UpSettings(model=Path("m")).prefill == 1


def test_reading_settings_needs_no_torch() -> None:
    code = "import sys, protocol.config, protocol.sockets; sys.exit('torch' in sys.modules or 'engine' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=250).returncode == 0
