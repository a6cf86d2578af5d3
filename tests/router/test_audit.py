"""What workers' audits find is kept by the router, and told by ``GET /audit`` and ``baton audit``."""

from __future__ import annotations

import asyncio
import json

from typer.testing import CliRunner, Result

from baton.main import app
from protocol.ids import RequestId
from protocol.messages import AuditFound
from router.audit import AuditBook
from tests.router.harness import FakeWorker, Harness, until

COUNTERS = {
    "baton_state_audit_violations_total": 0.0,
    "baton_cache_published_snapshots_total": 77.0,
    "baton_cache_hits_total": 31.0,
    "baton_deep_audit_passed_total": 3.0,
    "baton_deep_audit_largest_difference": 2e-6,
}


async def baton_audit(harness: Harness, *options: str) -> Result:
    arguments = ["audit", "--url", harness.router.url, *options]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}))


def found(worker: FakeWorker, claimed: int = 3920, held: int | None = 3662) -> AuditFound:
    return AuditFound(
        epoch=worker.epoch, purpose="publish", request_id=RequestId("req-7"), step=12, claimed=claimed, held=held, story="local; admitted"
    )


async def test_nothing_found(harness: Harness) -> None:
    worker = await harness.decode("d0")
    worker.counters = COUNTERS
    await until(lambda: harness.router.cluster.table.decodes[0].counters)
    assert (await harness.client.get("/audit")).json() == {
        "violations": 0,
        "entries": [],
        "workers": [
            {
                "worker_id": "d0",
                "role": "decode",
                "violations": 0,
                "published": 77,
                "hits": 31,
                "deep": {"passed": 3, "failed": 0, "skipped": 0, "errors": 0},
                "largest_difference": 2e-6,
            }
        ],
    }
    told = await baton_audit(harness)
    assert told.exit_code == 0
    assert "0 violations" in told.output
    assert "d0" in told.output


async def test_a_worker_that_found_something_is_degraded(harness: Harness) -> None:
    found_some, found_none = await harness.decode("d0"), await harness.decode("d1")
    found_some.counters, found_none.counters = COUNTERS | {"baton_state_audit_violations_total": 2.0}, COUNTERS
    await until(lambda: all(worker.counters for worker in harness.router.cluster.table.decodes))
    workers = (await harness.client.get("/health")).json()["workers"]
    assert {worker["worker_id"]: (worker["degraded"], worker["violations"]) for worker in workers} == {"d0": (True, 2), "d1": (False, 0)}


async def test_a_violation_is_told_with_its_story_and_fails_the_command(harness: Harness) -> None:
    worker = await harness.decode("d0")
    await worker.send(found(worker))
    await until(lambda: harness.router.cluster.audit.total)
    report = (await harness.client.get("/audit")).json()
    assert report["violations"] == 1
    (entry,) = report["entries"]
    assert (entry["worker_id"], entry["purpose"], entry["claimed"], entry["held"]) == ("d0", "publish", 3920, 3662)
    assert (entry["request_id"], entry["step"], entry["story"]) == ("req-7", 12, "local; admitted")
    table = await baton_audit(harness)
    assert table.exit_code == 1
    assert all(word in table.output for word in ("3920", "3662", "req-7", "1 violation\n"))
    plain = await baton_audit(harness, "--json")
    assert plain.exit_code == 1
    assert json.loads(plain.output) == report


async def test_what_was_found_before_the_router_started_fails_the_command_too(harness: Harness) -> None:
    worker = await harness.decode()
    worker.counters = COUNTERS | {"baton_state_audit_violations_total": 2.0}
    await until(lambda: harness.router.cluster.table.decodes[0].counters)
    told = await baton_audit(harness)
    assert told.exit_code == 1
    assert "2 violations, 2 of them not listed" in told.output


async def test_findings_outlive_their_worker(harness: Harness) -> None:
    worker = await harness.decode()
    await worker.send(found(worker, held=None))
    await worker.stop_beating()  # a heartbeat after the goodbye would bring it back
    await worker.leave()
    await until(lambda: not len(harness.router.cluster.table))
    report = (await harness.client.get("/audit")).json()
    assert [(entry["claimed"], entry["held"]) for entry in report["entries"]] == [(3920, None)]


async def test_the_newest_findings_are_kept_and_all_are_counted(harness: Harness) -> None:
    worker = await harness.decode()
    book, (known,) = AuditBook(max_kept=3), harness.router.cluster.table.decodes
    for number in range(10):
        book.note(known, found(worker, claimed=number))
    assert book.total == 10
    assert [entry["claimed"] for entry in book.entries] == [7, 8, 9]


async def test_what_is_told_fits_a_terminal_and_keeps_ids_whole(harness: Harness) -> None:
    worker = await harness.decode("decode-" + "long-host-name-" * 6)
    request_id = RequestId("cmpl-" + "0123456789" * 9)
    await worker.send(found(worker).model_copy(update={"request_id": request_id, "story": "seal, 4011 tokens; " * 20}))
    await until(lambda: harness.router.cluster.audit.total)
    told = await asyncio.to_thread(lambda: CliRunner().invoke(app, ["audit", "--url", f"{harness.router.url}/v1"], env={"COLUMNS": "80"}))
    assert told.output.count("decode-" + "long-host-name-" * 6) == 2
    assert f"request {request_id}, step 12" in told.output.replace("\n    ", " ")
    assert "…" not in told.output
    assert not [line for line in told.output.splitlines() if len(line) > 80 and "long-host" not in line and request_id not in line]
