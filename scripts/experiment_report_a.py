"""Report A at full size: 20,000 random schedules for each of 20 configurations, and the cost table. See docs/experiments/prefix-cache.md.

    python -m scripts.experiment_report_a --schedules 20000 --processes 8 --out report-a.json
    python -m scripts.experiment_report_a --costs

Results are written after each piece; called again with the same ``--out`` it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.reproductions.chunk_costs import configurations, cost
from tests.reproductions.grid_schedules import Arrangement, arrangements, columns, ours, run_schedules

PIECE = 500
KINDS = ("ours", "refused", "believed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20_000, help="for each configuration, with our rules")
    parser.add_argument("--fault-schedules", type=int, default=500, help="for each configuration, with the fault")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("report-a.json"))
    parser.add_argument("--costs", action="store_true", help="the cost table only")
    options = parser.parse_args()
    if options.costs:
        print(cost_table())
        return
    run_all(options)
    print(schedule_table(json.loads(options.out.read_text())))


def run_all(options: argparse.Namespace) -> None:
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with ProcessPoolExecutor(options.processes) as pool:
        counts = {"ours": options.schedules, "refused": options.fault_schedules, "believed": options.fault_schedules}
        pieces = [
            (kind, arrangement, seed)
            for seed in range(max(counts.values()) // PIECE)
            for kind in KINDS
            for arrangement in arrangements()
            if seed < counts[kind] // PIECE and name(kind, arrangement, seed) not in done
        ]
        running = {pool.submit(piece, *each): name(*each) for each in pieces}
        for future in as_completed(running):
            done[running[future]] = future.result()
            options.out.write_text(json.dumps(done))


def name(kind: str, arrangement: Arrangement, seed: int) -> str:
    return f"{kind} {arrangement.policy} {arrangement.offset} {'on' if arrangement.partial_hits else 'off'} {seed}"


def piece(kind: str, arrangement: Arrangement, seed: int) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    policies = ours(arrangement) if kind == "ours" else columns(arrangement, believed=kind == "believed")
    start = time.process_time()
    outcome = run_schedules(arrangement, PIECE, policies, seed)
    return asdict(outcome) | {
        "lies": [str(lie) for lie in outcome.lies[:3]],
        "num_lies": len(outcome.lies),
        "cpu_s": time.process_time() - start,
    }


def schedule_table(done: dict[str, Any]) -> str:
    """Markdown. One row per configuration of ours, and one per configuration and way of the fault."""
    rows: dict[str, dict[str, Any]] = {}
    for key, outcome in done.items():
        row = rows.setdefault(key.rpartition(" ")[0], {"schedules": 0, "published": 0, "resumed": 0, "refused": 0, "poisoned_schedules": 0})
        for field in row:
            row[field] += outcome[field]
    lines = [
        "| rules | chunks | offset | partial hits | schedules | states published | hits | refused | schedules with poison |",
        "|---" * 9 + "|",
    ]
    for kind in KINDS:
        for key in sorted(key for key in rows if key.startswith(kind)):
            lines.append("| " + " | ".join([*key.split(" "), *(f"{number:,}" for number in rows[key].values())]) + " |")
    return "\n".join(lines)


def cost_table() -> str:
    """Markdown: steps, and states on the grid, of the old rule and of ours with and without its backed-off stop."""
    lines = ["| grid | prompt | share | old: steps, states | with its stop: strict | soft | without: strict | soft |", "|---" * 8 + "|"]
    for each in configurations():
        rules = [each.old(), *(each.ours(policy, backoff) for backoff in (each.grid, 0) for policy in ("strict", "soft"))]
        costs = [cost(each, rule) for rule in rules]
        cells = [str(each.grid), str(each.length), str(each.share), *(f"{one.steps}, {len(one.snapshots)}" for one in costs)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
