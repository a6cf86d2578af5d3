"""The benchmark script runs and tells what it should; its figures are nobody's business here."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_engine.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=250, check=False)


def test_json_has_a_result_for_each_batch(checkpoint: Path) -> None:
    sizes = ("--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "2", "--threads", "1", "--kernels", "torch")
    done = run(checkpoint, "--batch", "1", "--batch", "3", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [(result["backend"], result["batch"]) for result in results] == [("baton", 1), ("baton", 3)]
    for result in results:
        assert result["same_tokens"] == 1.0
        for rate in (result["prefill"], result["decode"]):
            assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]


def test_a_backend_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 40}')
    done = run(tmp_path, "--repeats", "1")
    assert done.returncode != 0
    assert "baton ended with status 1" in done.stderr
