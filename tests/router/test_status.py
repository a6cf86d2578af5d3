"""What the router says about itself; tokenising; request ids."""

from __future__ import annotations

import httpx

from protocol.messages import Load, Paired, Peers
from tests.router.harness import MODEL_LEN, Harness, StartRouter, until


async def get(harness: Harness, path: str, status: int = 200) -> dict[str, object]:
    response = await harness.client.get(path)
    assert response.status_code == status, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


async def test_models(harness: Harness) -> None:
    (card,) = (await harness.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", MODEL_LEN)
    assert (await get(harness, "/v1/models/tiny"))["id"] == "tiny"
    await harness.decode(capacity={"max_model_len": 100})
    assert (await get(harness, "/v1/models/tiny"))["max_model_len"] == 100


async def test_a_name_of_ones_own(start_router: StartRouter) -> None:
    harness = await start_router(served_model_name="org/name")
    assert (await get(harness, "/v1/models/org/name"))["id"] == "org/name"
    decode = await harness.decode()
    decode.script = harness.says("x")
    assert (await harness.complete(model="org/name")).json()["model"] == "org/name"


async def test_ready_once_somebody_decodes(harness: Harness) -> None:
    body = await get(harness, "/ready", 503)
    assert body["reasons"] == ["0 of 1 decode workers"]
    decode = await harness.decode()
    assert await get(harness, "/ready") == {"ready": True, "mode": "local"}
    decode.draining = True
    await decode.beat()
    await until(lambda: harness.router.cluster.table.decodes[0].draining)
    assert (await get(harness, "/ready", 503))["reasons"] == ["0 of 1 decode workers, 1 draining"]


async def test_ready_waits_for_as_many_as_configured_and_their_pairing(start_router: StartRouter) -> None:
    harness = await start_router(min_prefill=1, min_decode=1)
    await harness.decode("d")
    assert (await get(harness, "/ready", 503))["reasons"] == ["0 of 1 prefill workers"]
    prefill = await harness.prefill("p")
    assert (await get(harness, "/ready", 503))["reasons"] == ["no decode worker is paired with a prefill worker yet"]
    decode = harness.workers[0]
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=False, field="dtype", reason="float32 here, float64 there"))
    await until(lambda: harness.router.cluster.table.decodes[0].unpaired)
    reasons = (await get(harness, "/ready", 503))["reasons"]
    assert "(d: dtype: float32 here, float64 there)" in str(reasons)
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=True))
    await until(lambda: harness.router.cluster.table.decodes[0].paired)
    assert await get(harness, "/ready") == {"ready": True, "mode": "split"}


async def test_pairing_with_a_worker_that_has_left_counts_for_nothing(harness: Harness) -> None:
    prefill, decode = await harness.pair()
    await prefill.stop_beating()
    await prefill.leave()
    await until(lambda: not harness.router.cluster.table.prefills)
    await decode.send(Paired(epoch=decode.epoch, peer=prefill.epoch, ok=True))
    await decode.expect(Peers)
    decode.script = harness.says("x")
    assert (await harness.complete()).status_code == 200
    assert (await get(harness, "/ready"))["mode"] == "local"


async def test_health_tells_of_every_worker(harness: Harness) -> None:
    assert (await get(harness, "/health"))["mode"] == "down"
    prefill, decode = await harness.pair()
    body = (await harness.client.get("/health")).json()
    assert (body["status"], body["ready"], body["mode"], body["model"]) == ("ok", True, "split", "tiny")
    assert body["fingerprint"]["weights_digest"] == "w"
    workers = {worker["worker_id"]: worker for worker in body["workers"]}
    assert workers[decode.worker_id]["paired"] == [prefill.epoch]
    assert workers[decode.worker_id]["info"] == {"kernels": "native: built and checked", "transport": "fake 1.0"}
    assert workers[prefill.worker_id]["role"] == "prefill"
    assert not any(worker["degraded"] or worker["violations"] for worker in workers.values())


async def test_live_version_and_server_info(harness: Harness) -> None:
    assert await get(harness, "/live") == {"status": "ok"}
    assert set(await get(harness, "/version")) == {"version"}
    info = await get(harness, "/server_info")
    assert info["mode"] == "down"
    assert info["max_model_len"] == MODEL_LEN
    assert info["settings"]["queue_limit"] == 256  # type: ignore[index]


async def test_openapi_knows_the_bodies(harness: Harness) -> None:
    paths = (await harness.client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in schema["properties"]


async def test_metrics(harness: Harness) -> None:
    _, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    decode.load = Load(running=2, free_blocks=7, held_for_peers=1)
    decode.counters = {
        "baton_state_audit_violations_total": 3,
        "steps_total": 5,
        "baton_cache_blocks": 8,
        "baton_requests_total": 9,
        "bad name": 1,
    }
    await decode.beat()
    await harness.complete()
    num_output = len(harness.ids(" the cat")) + 1
    for name, value in {
        'baton_requests_total{ending="finished_stop"}': 1,
        "baton_prompt_tokens_total": len(harness.ids("hello world")),
        "baton_generation_tokens_total": num_output,
        'baton_draft_tokens_total{outcome="accepted"}': 5,
        'baton_draft_tokens_total{outcome="proposed"}': 9,
        "baton_transfer_bytes_total": 1000,
        "baton_ttft_seconds_count": 1,
        'baton_ttft_part_seconds_count{part="router"}': 1,
        'baton_ttft_part_seconds_sum{part="queue"}': 0.001,
        'baton_ttft_part_seconds_sum{part="prefill"}': 0.02,
        'baton_ttft_part_seconds_sum{part="transfer"}': 0.003,
        'baton_ttft_part_seconds_sum{part="decode_wait"}': 0.004,
        "baton_request_seconds_count": 1,
        "baton_time_per_output_token_seconds_count": 1,
        "baton_requests_running": 0,
        'baton_workers{role="prefill",state="ready"}': 1,
        f'baton_worker_held_for_peers{{role="decode",worker="{decode.worker_id}"}}': 1,
        f'baton_worker_free_blocks{{role="decode",worker="{decode.worker_id}"}}': 7,
        f'baton_state_audit_violations_total{{role="decode",worker="{decode.worker_id}"}}': 3,
        f'baton_steps_total{{role="decode",worker="{decode.worker_id}"}}': 5,
        f'baton_cache_blocks{{role="decode",worker="{decode.worker_id}"}}': 8,
        f'baton_worker_requests_total{{role="decode",worker="{decode.worker_id}"}}': 9,
        "vllm:generation_tokens_total": num_output,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:num_requests_running": 0,
    }.items():
        assert await harness.metric(name) == value, name


async def test_tokenize_and_back(harness: Harness) -> None:
    async def post(path: str, **body: object) -> httpx.Response:
        return await harness.client.post(path, json=body)

    body = (await post("/tokenize", prompt="the 🎉", return_token_strs=True)).json()
    assert body["tokens"] == list(harness.ids("the 🎉"))
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == MODEL_LEN
    assert (await post("/detokenize", tokens=body["tokens"])).json() == {"prompt": "the 🎉"}
    chat = (await post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()
    text = (await post("/detokenize", tokens=chat["tokens"])).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await post("/tokenize")).status_code == 400
    assert (await post("/detokenize", tokens=[320])).json()["error"]["param"] == "tokens"


async def test_request_ids(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x")
    mine = {"x-request-id": "abc-123"}
    for response in (
        await harness.client.get("/live", headers=mine),
        await harness.client.get("/nowhere", headers=mine),
        await harness.client.post("/v1/completions", json={"prompt": "x"}, headers=mine),
        await harness.client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=mine),
        await harness.client.post("/v1/completions", json={}, headers=mine),
    ):
        assert response.headers["x-request-id"] == "abc-123"
    ids = {(await harness.client.get("/live", headers=bad)).headers["x-request-id"] for bad in ({}, {"x-request-id": "a" * 200})}
    assert len(ids) == 2
    assert "a" * 200 not in ids
