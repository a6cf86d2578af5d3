"""``return_timings``: what a client learns about its own request's hand-off and drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.harness import Harness, events

OF_THE_WORKERS = {"queue_ms": 1.0, "prefill_ms": 20.0, "transfer_ms": 3.0, "decode_wait_ms": 4.0, "transfer_bytes": 1000}
OF_THE_DRAFTS = {"steps": 3, "proposed_drafts": 9, "accepted_drafts": 5}
"""What the harness's workers say of every request."""


def parts_of(timings: dict[str, Any]) -> dict[str, Any]:
    """Without those that the router's clock measures here; these must be in order."""
    assert 0 <= timings["router_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
    return {key: value for key, value in timings.items() if key not in ("router_ms", "first_token_ms", "total_ms")}


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_the_last_chunk_of_each_choice_has_them(harness: Harness, path: str) -> None:
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    ask = harness.complete if path == "completions" else harness.chat
    *chunks, _ = events(await ask(stream=True, n=2, return_timings=True))
    told = [choice for chunk in chunks for choice in chunk["choices"] if "timings" in choice]
    assert sorted(choice["index"] for choice in told) == [0, 1]
    for choice in told:
        assert choice["finish_reason"] == "stop"
        assert parts_of(choice["timings"]) == OF_THE_WORKERS | OF_THE_DRAFTS


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_a_whole_answer_has_them_too(harness: Harness, path: str) -> None:
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    ask = harness.complete if path == "completions" else harness.chat
    (choice,) = (await ask(return_timings=True)).json()["choices"]
    assert parts_of(choice["timings"]) == OF_THE_WORKERS | OF_THE_DRAFTS


async def test_nobody_gets_them_unasked(harness: Harness) -> None:
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    assert "timings" not in (await harness.complete()).text
    assert "timings" not in (await harness.complete(stream=True)).text


async def test_what_nobody_counted_is_null(harness: Harness) -> None:
    """At a stop string the router ends the request itself and never hears D's account."""
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat sat", pause_s=0.01)
    (choice,) = (await harness.complete(stop="cat", max_tokens=20, return_timings=True)).json()["choices"]
    assert parts_of(choice["timings"]) == OF_THE_WORKERS | dict.fromkeys(OF_THE_DRAFTS)


async def test_another_type_is_refused_by_name(harness: Harness) -> None:
    refused = await harness.complete(return_timings="yes")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_timings"
