"""``baton bench fewshot``: what its prompts have in common, its cluster, and the audit's line."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from baton.load_table import load_table
from baton.local_server import LocalOptions
from baton.main import app
from loadgen.fewshot import fewshot_prompts
from loadgen.report import Slo, report
from loadgen.run import Run
from tests.loadgen.expert_server import ExpertServer, serving


def test_all_prompts_begin_with_the_same_shots_and_differ_after_them() -> None:
    prompts = [prompt.text for prompt in fewshot_prompts(3, shots=20, questions=200, max_tokens=8)]
    parts = [prompt.rpartition("Question:") for prompt in prompts]
    (shared,) = {before for before, _, _ in parts}
    assert shared.count("Answer:") == shared.count("Question:") == 20
    assert len({question for _, _, question in parts}) == 200
    assert len({len(prompt) for prompt in prompts}) > 20
    assert [prompt.text for prompt in fewshot_prompts(3, 20, 200, 8)] == prompts
    assert next(iter(fewshot_prompts(4, 20, 1, 8))).text[:200] != prompts[0][:200]


def test_every_answer_is_right() -> None:
    (prompt,) = fewshot_prompts(0, shots=50, questions=1, max_tokens=8)
    for line in prompt.text.splitlines():
        if line.startswith("Answer: "):
            steps, _, total = line.removeprefix("Answer: ").partition(" #### ")
            for step in steps.split(". "):
                left, _, right = step.rstrip(".").partition(" is ")
                one, sign, other = left.split()
                assert int(right) == int(one) + (int(other) if sign == "plus" else -int(other)) >= 0
            assert steps.rstrip(".").endswith(f"is {total}")


def test_a_cluster_of_its_own_gets_the_budget_and_the_room() -> None:
    plan = LocalOptions(step_tokens=8192, max_running=32, prefix_cache=False).plan()
    for spec in plan.specs:
        told = {key: value for key, value in spec.environment.items() if key.startswith("BATON_")}
        if spec.module == "router":
            assert told == {}
        else:
            assert told == {"BATON_STEP_TOKENS": "8192", "BATON_MAX_PREFILL_CHUNK": "8192", "BATON_MAX_RUNNING": "32"}
            assert "--no-prefix-cache" in spec.args


def test_it_asks_any_server() -> None:
    with serving(ExpertServer(())) as server:
        result = CliRunner().invoke(
            app, ("bench", "fewshot", "--url", server.url, "--questions", "5", "--shots", "2", "--concurrency", "2")
        )
    assert result.exit_code == 0, result.output
    assert len({body["prompt"] for body in server.bodies}) == 5
    assert "time to first token" in result.output


def audit(violations: int) -> dict[str, Any]:
    entry = {"worker_id": "p0", "at": 0.0, "purpose": "publish", "request_id": "r", "step": 1, "claimed": 3920, "held": 3662}
    entry |= {"detail": "", "story": ""}
    deep = {"deep": {"passed": 0, "failed": 0, "skipped": 0, "errors": 0}, "largest_difference": 0.0}
    workers = [
        {"worker_id": "p0", "violations": violations, "published": 7, "hits": 5} | deep,
        {"worker_id": "d0", "violations": 0, "published": 1, "hits": 2} | deep,
    ]
    return {"violations": violations, "workers": workers, "entries": [entry] * violations}


def test_the_audits_line() -> None:
    told = report(Run(), {}, Slo(None, None), asked=0, interrupted=False, with_tokens=False)
    for violations, words in ((0, "0 violations, 8 states kept, 7 hits"), (1, "publish: hashed as state@3920 but holds state@3662")):
        console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with console.file:
            console.print(load_table("t", told | {"audit": audit(violations)}))
            assert words in console.export_text()
