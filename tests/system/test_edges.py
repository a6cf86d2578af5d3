"""The shortest and the strangest requests through the whole path, and what the stream looks like."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.system.cluster_kit import PATIENCE_S, Cluster, complete, stream_to_end
from tests.system.conftest import Alone

TEXT = "The baton is handed over after the first part of the race, and"


@pytest.fixture(autouse=True)
def _with_drafts(cluster: Cluster) -> None:
    cluster.use_speculation(3)


async def test_the_first_answer_is_that_of_a_plain_process(cluster: Cluster, alone: Alone) -> None:
    (expected,) = alone([TEXT], max_tokens=30)
    async with cluster.client() as client:
        streamed = await stream_to_end(client, TEXT, max_tokens=30, stream_options={"include_usage": True})
        whole = await complete(client, TEXT, max_tokens=30)
    assert streamed.token_ids == whole["token_ids"] == expected
    assert streamed.text == whole["text"]
    assert streamed.finish_reason == whole["finish_reason"] == "length"
    assert streamed.done
    assert streamed.error is None
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 30


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_the_shortest_prompts_and_answers(cluster: Cluster, alone: Alone, length: int, max_tokens: int) -> None:
    prompt = [77, 300][:length]
    async with cluster.client() as client:
        choice = await complete(client, prompt, max_tokens=max_tokens, ignore_eos=True)
    assert [choice["token_ids"]] == alone([prompt], max_tokens=max_tokens, ignore_eos=True)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("length", [1, 2, 40])
async def test_the_first_token_is_the_end(cluster: Cluster, length: int) -> None:
    eos = json.loads((cluster.model / "generation_config.json").read_text())["eos_token_id"][0]
    async with cluster.client() as client:
        choice = await complete(client, list(range(100, 100 + length)), max_tokens=5, logit_bias={str(eos): 100})
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [eos]
    assert choice["text"] == ""


async def test_a_chat_goes_through_the_same_path(cluster: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "Who carries the baton?"}], "max_tokens": 8, "temperature": 0}
    async with cluster.client() as client:
        before = _moved(cluster)
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 8
    assert _moved(cluster) > before


def _moved(cluster: Cluster) -> float:
    """Bytes from the prefill worker to the decode worker, as answers tell them."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_transfer_bytes_total"))


async def test_too_long_is_refused_before_any_work(cluster: Cluster) -> None:
    async with cluster.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": [7] * 5000, "max_tokens": 1})
    assert answer.status_code == 400
    assert "4096" in answer.json()["error"]["message"]
