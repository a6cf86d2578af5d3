"""Figures from what was recorded: pure functions."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from loadgen import metrics
from loadgen.answer import Answer
from loadgen.arrival import run_closed, run_poisson
from loadgen.compare import compare
from loadgen.prompts import Lengths, Shape, random_prompts
from loadgen.record import Session, Turn, turn_of
from loadgen.report import Slo, report
from loadgen.run import Run


def turn(**values: Any) -> Turn:
    some: dict[str, Any] = {"started_s": 0.0, "ttft_s": 0.1, "gaps_s": (0.01,) * 4, "total_s": 0.14, "completion_tokens": 5}
    return Turn(**some | values)


def test_an_answer_is_put_together_from_its_events() -> None:
    answer = Answer(asked_at=10.0)
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]},
        {"choices": [{"delta": {}, "token_ids": [2, 3]}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "read", "arguments": '{"pa'}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": 'th": 1}'}}, {"index": 1, "id": "d"}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop", "timings": {"steps": 3, "accepted_drafts": 4, "proposed_drafts": 10}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}},
    ]
    for number, event in enumerate(events):
        answer.take(event, 10.5 + number)
    assert [(call.call_id, call.name, call.arguments) for call in answer.calls] == [("c", "read", '{"path": 1}'), ("d", "", "")]
    kept = turn_of(answer, began_at=8.0)
    assert (kept.started_s, kept.ttft_s, kept.gaps_s, kept.total_s) == (2.0, 1.5, (1.0, 1.0, 1.0), 6.5), "empty events bring nothing"
    assert (kept.prompt_tokens, kept.completion_tokens, kept.cached_tokens) == (9, 7, 2)
    assert (kept.token_ids, kept.tokens_per_step, kept.per_token_s) == ((1, 2, 3), 3.0, 0.5)


def test_halves_of_a_character_come_together_and_a_lone_one_can_be_sent() -> None:
    answer = Answer(asked_at=0.0)
    for text in ("\ud83d", "\ude00", "\ud83d"):
        answer.take({"choices": [{"delta": {"content": text}}]}, 1.0)
    assert answer.message()["content"] == "\U0001f600\ufffd"


@pytest.mark.parametrize("whole", [{"id": "c", "function": {"name": "a"}}, {"index": 2, "function": {"name": "a"}}])
def test_calls_without_index_or_id_are_told_apart(whole: dict[str, Any]) -> None:
    answer = Answer(asked_at=0.0)
    other = whole | {"index": 5} if "index" in whole else whole
    answer.take({"choices": [{"delta": {"tool_calls": [whole, other]}}]}, 1.0)
    assert [call.name for call in answer.calls] == ["a", "a"]
    assert all(call.call_id for call in answer.calls)


@pytest.mark.parametrize(
    ("successes", "trials", "band"), [(580, 1500, (0.3624, 0.4116)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (0, 0, (0.0, 1.0))]
)
def test_the_band_is_wilsons(successes: int, trials: int, band: tuple[float, float]) -> None:
    assert metrics.wilson(successes, trials) == pytest.approx(band, abs=1e-4)


def test_percentiles_are_values_that_occurred() -> None:
    spread = metrics.Spread.of(range(1, 201))
    assert spread is not None
    assert (spread.p50, spread.p99, spread.max, spread.mean) == (100, 198, 200, 100.5)
    assert metrics.Spread.of([]) is None


@pytest.mark.parametrize(
    ("values", "good"),
    [({}, True), ({"ttft_s": 0.3}, False), ({"gaps_s": (0.05,) * 4}, False), ({"failure": "timeout"}, False), ({"ttft_s": None}, False)],
)
def test_goodput_counts_answers_within_both_bounds(values: dict[str, Any], good: bool) -> None:
    assert metrics.meets(turn(**values), slo_ttft_s=0.2, slo_itl_s=0.02) is good
    run = Run([Session(name="0", turns=[turn(**values)])], duration_s=2.0)
    told = report(run, {}, Slo(200, 20), asked=1, interrupted=False, with_tokens=False)
    assert told["goodput"] == {"slo": {"ttft_ms": 200, "itl_ms": 20}, "good": int(good), "requests": 1, "per_s": good / 2}


def test_tokens_per_step_leave_the_first_step_out() -> None:
    drafted = turn(steps=3, proposed_drafts=10, accepted_drafts=3)
    assert metrics.tokens_per_step([drafted, turn(steps=5), turn()]) == 4 / 2
    assert metrics.tokens_per_step([turn(steps=5)]) is None


def test_a_report_says_what_was_resolved_by_kind() -> None:
    sessions = [Session(name=str(number), kind="ab"[number % 2], resolved=number < 3, turns=[turn()]) for number in range(12)]
    told = report(Run(sessions, duration_s=1.0), {}, Slo(), asked=20, interrupted=True, with_tokens=True)
    assert (told["resolved"], told["instances"], told["accuracy"], told["interrupted"], told["goodput"]) == (3, 12, 0.25, True, None)
    assert told["by_kind"] == {"a": {"resolved": 2, "instances": 6}, "b": {"resolved": 1, "instances": 6}}
    assert [session["name"] for session in told["sessions"]] == [str(number) for number in range(12)]
    empty = report(Run(), {}, Slo(), asked=20, interrupted=True, with_tokens=True)
    assert (empty["resolved"], empty["instances"]) == (None, 0)


def as_report(*turns: list[int], resolved: bool = True, name: str = "7") -> dict[str, Any]:
    return {"sessions": [{"name": name, "resolved": resolved, "turns": [{"token_ids": ids} for ids in turns]}]}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (as_report([1, 2], [3]), None),
        (as_report([1, 2], [4]), "session 7: turn 2, token 0: 3 against 4"),
        (as_report([1, 2, 5], [3]), "session 7: turn 1, 2 tokens against 3"),
        (as_report([1, 2]), "session 7: 2 turns against 1"),
        (as_report([1, 2], [3], resolved=False), "session 7: resolved is True against False"),
    ],
)
def test_the_first_difference_is_named(other: dict[str, Any], difference: str | None) -> None:
    result = compare(as_report([1, 2], [3]), other)
    assert result.differences[:1] == ((difference,) if difference else ())
    assert (result.turns, result.tokens) == (2, 3)


def test_tries_that_failed_are_not_compared() -> None:
    retried = as_report([1, 2], [], [3])
    retried["sessions"][0]["turns"][1]["failure"] = "http 502"
    assert compare(retried, as_report([1, 2], [3])).differences == ()


def test_every_session_that_differs_counts() -> None:
    one, other = ({"sessions": [as_report([n], name=str(n))["sessions"][0] for n in names]} for names in ((1, 2, 3), (2, 3, 4)))
    other["sessions"][0]["turns"][0]["token_ids"] = [9]
    result = compare(one, other)
    assert result.sessions == 4
    assert result.differences == (
        "session 1 is in one of them only",
        "session 4 is in one of them only",
        "session 2: turn 1, token 0: 2 against 9",
    )


def of_load(load: str = "bench swe", asked: int = 1, **settings: object) -> dict[str, Any]:
    return as_report([1, 2]) | {"load": load, "sessions_asked": asked, "settings": {"seed": 0, "max_tokens": 64} | settings}


def test_other_servers_and_arrivals_are_the_same_load() -> None:
    other = of_load(url="http://127.0.0.1:1", model="m", owned_by="vllm", arrival="poisson", rate=2.0, concurrency=3, retries=1)
    assert compare(of_load(local={"prefill": "1"}, concurrency=8), other).differences == ()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (of_load("bench fewshot", shots=20), "same load: load is 'bench swe' in one and 'bench fewshot' in the other"),
        (of_load(seed=1), "seed is 0 in one and 1"),
        (of_load(asked=2), "sessions_asked is 1 in one and 2"),
        (of_load(shots=20), "shots is None in one and 20"),
        (of_load() | {"sessions": as_report([1], name="8")["sessions"]}, "no session is in both"),
    ],
)
def test_reports_of_different_loads_cannot_be_compared(other: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compare(of_load(), other)


WRONG = [
    ({}, "no sessions"),
    ({"sessions": [{"name": "1", "turns": [{}]}]}, "--tokens"),
    ({"sessions": [{}]}, "sessions.0.name: Field required"),
]


@pytest.mark.parametrize(("report", "why"), WRONG)
def test_what_is_no_report_with_token_ids_cannot_be_compared(report: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compare(report, as_report([1]))


async def test_closed_arrival_keeps_so_many_at_once() -> None:
    running, most, done = 0, 0, 0

    async def job() -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running, done = running - 1, done + 1

    await run_closed([job] * 20, 4)
    assert (most, done) == (4, 20)


async def test_poisson_arrival_waits_for_nobody() -> None:
    begun, all_begun = 0, asyncio.Event()

    async def job() -> None:
        nonlocal begun
        begun += 1
        if begun == 10:
            all_begun.set()
        await all_begun.wait()

    async with asyncio.timeout(30):
        await run_poisson([job] * 10, rate=1000.0, seed=1)
    assert begun == 10


@pytest.mark.parametrize("shape", list(Shape))
def test_lengths_have_their_mean(shape: Shape) -> None:
    random = Random(0)
    drawn = [Lengths(shape, 100, 200).draw(random) for _ in range(3000)]
    for place, mean in enumerate((100, 200)):
        values = [pair[place] for pair in drawn]
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.1)
        assert min(values) >= 1
        assert max(values) <= 4 * mean


def test_random_prompts_are_the_same_for_a_seed() -> None:
    lengths = Lengths(Shape.SHAREGPT, 20, 20)
    assert list(random_prompts(3, 9, lengths)) == list(random_prompts(3, 9, lengths))
    assert len({prompt.text for prompt in random_prompts(3, 9, lengths)}) == 9
