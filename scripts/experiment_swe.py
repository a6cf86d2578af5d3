"""The rows of docs/experiments/swe.md: the same instances through split and single process, with and without drafts, and with report B's
fault; then token by token against the first row.

    python scripts/experiment_swe.py --instances 300 [--out DIR] [BENCH_SWE_OPTION ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadgen.compare import compare

FAULT = "padded-tail-as-prefill"
ROWS: dict[str, tuple[str, ...]] = {
    "split, K = 5": ("--prefill", "1", "--speculation", "5"),
    "split, K = 0": ("--prefill", "1", "--speculation", "0"),
    "single process, K = 0": ("--prefill", "0", "--speculation", "0"),
    "single process, K = 0, no cache": ("--prefill", "0", "--speculation", "0", "--no-prefix-cache"),
    "split, K = 5, fault of report B": ("--prefill", "1", "--speculation", "5", "--reproduce", FAULT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--out", type=Path, help="keep each row's report there")
    arguments, options = parser.parse_known_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    print("| | resolved | accuracy (95 %) | symptoms | tokens per step | first token p50, ms | same as the first row |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, row in ROWS.items():
        reports[name] = _run("--instances", str(arguments.instances), *row, *options)
        if arguments.out:
            file = arguments.out / f"{name.replace(' ', '').replace(',', '-')}.json"
            file.write_text(json.dumps(reports[name]), encoding="utf-8")
        print(_line(name, reports[name], next(iter(reports.values()))), flush=True)


def _run(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "baton", "bench", "swe", "--json", "--tokens", *options]
    report: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return report


def _line(name: str, report: dict[str, Any], first: dict[str, Any]) -> str:
    low, high = report["accuracy_95"]
    result = compare(first, report)
    same = result.differences[0] if result.differences else f"{result.sessions} sessions, {result.turns} turns, {result.tokens} tokens"
    cells = (
        name,
        f"{report['resolved']} / {report['instances']}",
        f"{100 * report['accuracy']:.2f} % ({100 * low:.1f} .. {100 * high:.1f})",
        ", ".join(f"{symptom} {count}" for symptom, count in sorted(report["symptoms"].items())) or "none",
        f"{report['tokens_per_step']:.2f}" if report["tokens_per_step"] else "1",
        f"{report['ttft_ms']['p50']:.0f}",
        same,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
