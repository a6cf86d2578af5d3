"""The ``baton`` command through its real door: a process, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cluster import free_port
from baton.main import app
from baton.up import plan_cluster
from protocol.config import UpSettings, load_settings

ROOT = Path(__file__).parents[2]
SUBCOMMANDS = ("up", "demo", "chat", "generate", "audit", "doctor", "bench")


def baton(*args: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | variables
    environment |= {"PYTHONSAFEPATH": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "baton", *args], input=stdin, capture_output=True, text=True, timeout=250, env=environment, cwd="/"
    )


def in_process(*args: str, stdin: str = "", **variables: str) -> Result:
    """The same without a process of its own, which is where the time of a start goes."""
    cleared: dict[str, str | None] = {key: None for key in os.environ if key.startswith("BATON_")}
    return CliRunner().invoke(app, args, input=stdin, env=cleared | variables)


def test_help_tells_every_subcommand() -> None:
    told = baton("--help")
    assert told.returncode == 0
    assert all(name in told.stdout for name in SUBCOMMANDS)


@pytest.mark.parametrize(
    ("args", "variables", "named"),
    [
        (("up", "--model", "/nowhere"), {}, "model=/nowhere"),
        (("up", "--model", "/"), {}, "config.json"),
        (("up", "--speculation", "9"), {}, "speculation=9"),
        (("up", "--decode", "0"), {}, "decode=0"),
        (("up", "--config", "/nowhere.toml"), {}, "/nowhere.toml"),
        (("up",), {"BATON_SPECULATON": "3"}, "BATON_SPECULATON"),
        (("generate", "--model", "/nowhere", "hi"), {}, "model=/nowhere"),
        (("generate", "--temperature", "-1", "hi"), {}, "--temperature"),
        (("generate", "--speculation", "8", "hi"), {}, "speculation=8"),
        (("generate", "--kernels", "magic", "hi"), {}, "kernels='magic'"),
        (("generate",), {}, "no prompt"),
        (("generate", "--prompts-file", "/nowhere"), {}, "prompts_file=/nowhere"),
        (("bench", "decode", "--model", "/nowhere"), {}, "model=/nowhere"),
        (("bench", "decode", "--batch", "10000000"), {}, "batch=10000000 is not possible: at most "),
        (("bench", "prefill", "--batch", "10000000"), {}, "batch=10000000 is not possible: at most "),
        (("up", "--log-level", "loud"), {}, "log_level='loud'"),
        (("up", "--audit-sample", "2"), {}, "audit_sample=2.0"),
        (("up", "--audit-sample", "0.5", "--no-prefix-cache"), {}, "snapshot_dir and audit_sample need prefix_cache"),
        (("up", "--no-prefix-cache"), {"BATON_SNAPSHOT_DIR": "/nowhere"}, "snapshot_dir and audit_sample need prefix_cache"),
    ],
)
def test_a_users_mistake_is_one_line_that_names_it_and_exit_code_2(args: tuple[str, ...], variables: dict[str, str], named: str) -> None:
    told = in_process(*args, **variables)
    assert told.exit_code == 2, told.output
    assert isinstance(told.exception, SystemExit)
    assert named in told.stderr
    assert told.stdout == ""


def test_a_mistake_leaves_no_traceback() -> None:
    told = baton("generate", "--model", "/nowhere", "hi")
    assert told.returncode == 2
    assert told.stderr == "error: model=/nowhere: no such directory\n"


def test_a_busy_port_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = baton("up", "--port", str(port))
    assert told.returncode == 2
    assert f"port={port}" in told.stderr
    assert "│" not in told.stderr, "no process may have logged"


def test_generate_answers_each_prompt_in_order_as_json_or_standard_input_and_speculation_changes_nothing() -> None:
    told = baton("generate", "--json", "--max-tokens", "12", "def f(x):", "class Baton:")
    assert told.returncode == 0, told.stderr
    records = [json.loads(line) for line in told.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["def f(x):", "class Baton:"]
    assert all(len(record["token_ids"]) == 12 and record["finish_reason"] == "length" for record in records)
    speculative = in_process("generate", "--json", "--max-tokens", "12", "--speculation", "5", stdin="class Baton:")
    assert json.loads(speculative.stdout) == records[1]


def test_a_table_of_the_config_file_holds_for_its_processes_and_flags_win(tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    port = free_port()
    config.write_text(f"[router]\nport = {port}\n[decode]\nspeculation = 2\nthreads = 7\n")
    settings = load_settings(UpSettings, "baton", {"speculation": 5}, config, {})
    plan = plan_cluster(settings, config, {})
    assert plan.url == f"http://127.0.0.1:{port}"
    (decode,) = (spec.args for spec in plan.specs if spec.module == "decode_worker")
    assert decode[decode.index("--speculation") + 1] == "5"
    assert "--threads" not in decode, "the file's value would lose against a flag"
    (prefill,) = (spec.args for spec in plan.specs if spec.module == "prefill_worker")
    assert "--threads" in prefill


def test_one_log_level_goes_to_all_processes() -> None:
    plan = plan_cluster(UpSettings(port=free_port(), log_level="warning"), None, {})
    assert [spec.args[spec.args.index("--log-level") + 1] for spec in plan.specs] == ["warning"] * 3
    told_nothing = plan_cluster(UpSettings(port=free_port()), None, {})
    assert not [spec for spec in told_nothing.specs if "--log-level" in spec.args], "a process's own file entry would lose against a flag"


def test_up_speculates_where_the_checkpoint_can() -> None:
    plan = plan_cluster(UpSettings(port=free_port()), None, {})
    (decode,) = (spec.args for spec in plan.specs if spec.module == "decode_worker")
    assert decode[decode.index("--speculation") + 1] == "3"


@pytest.mark.parametrize(
    ("given", "flag"), [({"prefix_cache": False}, "--no-prefix-cache"), ({"prefix_cache": True}, "--prefix-cache"), ({}, "")]
)
def test_up_passes_the_prefix_cache_on_to_all_workers(given: dict[str, object], flag: str) -> None:
    plan = plan_cluster(load_settings(UpSettings, "baton", {"port": free_port(), **given}, None, {}), None, {})
    for spec in plan.specs:
        assert [arg for arg in spec.args if "prefix-cache" in arg] == ([flag] if flag and spec.module != "router" else [])


def test_up_passes_the_audit_and_the_second_tier_on_to_all_workers(tmp_path: Path) -> None:
    """Whoever says them: a flag before the environment, that before the file."""
    config = tmp_path / "baton.toml"
    config.write_text(f'audit_sample = 0.1\n[baton]\nsnapshot_dir = "{tmp_path}"\n')
    for flags, environ, share in (
        ({}, {}, "0.1"),
        ({}, {"BATON_AUDIT_SAMPLE": "0.2"}, "0.2"),
        ({"audit_sample": 0.3}, {"BATON_AUDIT_SAMPLE": "0.2"}, "0.3"),
    ):
        settings = load_settings(UpSettings, "baton", {"port": free_port(), **flags}, config, environ)
        router, *workers = plan_cluster(settings, config, environ).specs
        assert not {"--audit-sample", "--snapshot-dir"} & set(router.args)
        for spec in workers:
            assert spec.args[spec.args.index("--audit-sample") + 1] == share
            assert spec.args[spec.args.index("--snapshot-dir") + 1] == str(tmp_path)


def test_a_binary_prompt_is_an_error_that_names_its_source(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"good\n\xff\xfe\n")
    told = in_process("generate", "--prompts-file", str(file))
    assert told.exit_code == 2
    assert f"prompts_file={file} is not UTF-8" in told.stderr


def test_doctor_names_versions_and_the_kernels_with_the_reason() -> None:
    told = in_process("doctor", "--json", "--no-link")
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert report["packages"]["torch"].startswith("2.13.0")
    assert report["kernels"]["chosen"]
    assert report["kernels"]["reason"]


def test_bench_decode_gives_json_with_the_spread() -> None:
    told = in_process("bench", "decode", "--json", "--runs", "1", "--new-tokens", "8", "--threads", "1")
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert report["decode tok/s, K=5"]["runs"] == 1
    assert report["ratio"] > 0


def test_chat_without_a_server_says_how_to_have_one() -> None:
    told = baton("chat", "--url", "http://127.0.0.1:9")
    assert told.returncode == 1
    assert "no server at http://127.0.0.1:9" in told.stderr
    assert "without --url" in told.stderr
