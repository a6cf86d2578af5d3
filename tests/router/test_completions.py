"""POST /v1/completions, not streamed."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.messages import Admit, Cancel, Prefill, TokenLogprob
from tests.router.harness import Harness, Script


async def test_prompt_is_prefilled_by_p_and_decoded_by_d(harness: Harness) -> None:
    prefill, decode = await harness.pair()
    decode.script = harness.says(" the cat")
    response = await harness.complete("hello world", max_tokens=8, temperature=0, seed=7)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": " the cat", "logprobs": None, "finish_reason": "stop", "stop_reason": harness.eos}]
    num_prompt = len(harness.ids("hello world"))
    num_output = len(harness.ids(" the cat")) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    admit, asked = await decode.expect(Admit), await prefill.expect(Prefill)
    assert admit.token_ids == harness.ids("hello world")
    assert asked.token_ids == admit.token_ids[:-1]
    assert asked.key == admit.key
    assert asked.decode_epoch == decode.epoch
    assert admit.prefill is not None
    assert admit.prefill.epoch == prefill.epoch
    assert (admit.sampling.max_tokens, admit.sampling.temperature, admit.sampling.seed) == (8, 0.0, 7)


async def test_a_prompt_of_one_token_needs_no_prefill_worker(harness: Harness) -> None:
    prefill, decode = await harness.pair()
    decode.script = harness.says(" cat")
    response = await harness.complete([7])
    assert response.json()["choices"][0]["text"] == " cat"
    assert (await decode.expect(Admit)).prefill is None
    assert not prefill.got(Prefill)


async def test_without_a_prefill_worker_decode_computes_the_prompt(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    assert (await harness.complete()).json()["choices"][0]["text"] == " cat"
    assert (await decode.expect(Admit)).prefill is None


async def test_short_prompts_stay_local_if_asked_for(start_router: Any) -> None:
    harness = await start_router(local_prefill_tokens=5)
    _, decode = await harness.pair()
    decode.script = harness.says("x")
    await harness.complete([7] * 5)
    assert (await decode.expect(Admit)).prefill is None
    await harness.complete([7] * 6)
    assert (await decode.expect(Admit)).prefill is not None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_max_tokens(harness: Harness, name: str) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat sat on the mat")
    choice = (await harness.complete(**{name: 2})).json()["choices"][0]
    assert choice["text"] == " the cat"
    assert choice["finish_reason"] == "length"
    assert (await decode.expect(Admit)).sampling.max_tokens == 2


async def test_defaults_are_openais(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x")
    null = dict.fromkeys(
        ["stop", "seed", "max_tokens", "temperature", "top_k", "logit_bias", "n", "stream", "logprobs", "suffix", "best_of"]
    )
    seeds = set()
    for fields in ({}, null, {"an_unknown_field": {"deep": [1]}, "user": "u"}):
        assert (await harness.complete(**fields)).status_code == 200
        sampling = (await decode.expect(Admit)).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (16, 1.0, 0, 1.0)
        seeds.add(sampling.seed)
    assert len(seeds) == 3


async def test_parameters_reach_the_worker(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x")
    response = await harness.complete(
        max_tokens=9, min_tokens=2, top_k=-1, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        logit_bias={"5": -100, "7": 1.5}, stop_token_ids=[9], ignore_eos=True, logprobs=None, temperature=0.7, seed=-1,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    sampling = (await decode.expect(Admit)).sampling
    assert sampling.model_dump() == {
        "max_tokens": 9, "min_tokens": 2, "top_k": 0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "logit_bias": {5: -100.0, 7: 1.5}, "stop_token_ids": (9,), "ignore_eos": True, "logprobs": None,
        "temperature": 0.7, "seed": 2**63 - 1,
    }  # fmt: skip


async def test_default_max_tokens_is_cut_to_what_fits(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says("x")
    assert (await harness.complete([7] * 250)).status_code == 200
    assert (await decode.expect(Admit)).sampling.max_tokens == 6


async def test_batch_and_n_are_choices_in_order(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = lambda admit: Script([harness.ids(f" {admit.token_ids[0]}/{admit.sampling.seed}")], "length", cached_tokens=1)
    body = (await harness.complete([[11, 12], [21, 22, 23]], n=2, seed=5)).json()
    assert [choice["text"] for choice in body["choices"]] == [" 11/5", " 11/6", " 21/5", " 21/6"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == sum(len(harness.ids(choice["text"])) for choice in body["choices"])
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_batch_of_texts(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = lambda admit: Script([admit.token_ids], "length")
    body = (await harness.complete(["the cat", "the dog"])).json()
    assert [choice["text"] for choice in body["choices"]] == ["the cat", "the dog"]


async def test_echo(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    assert (await harness.complete("the", echo=True)).json()["choices"][0]["text"] == "the cat"
    assert (await harness.complete(list(harness.ids("the")), echo=True)).json()["choices"][0]["text"] == "the cat"


async def test_token_ids_on_request(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat")
    choice = (await harness.complete("the", return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [*harness.ids(" cat"), harness.eos]
    assert choice["prompt_token_ids"] == list(harness.ids("the"))


async def test_stop_string_across_tokens_and_steps(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat sat on the mat", per_step=2, pause_s=0.02)
    body = (await harness.complete(stop=["t sat o", "zzz"], max_tokens=30, return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["text"] == " the ca"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "t sat o"
    # the tokens up to the one that completed the match, nothing of what the worker had ahead
    assert harness.tokenizer.decode(choice["token_ids"]).rstrip("n") == " the cat sat o"
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    await decode.expect(Cancel)


async def test_stop_string_kept_if_asked_for(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the cat sat")
    assert (await harness.complete(stop="cat", include_stop_str_in_output=True)).json()["choices"][0]["text"] == " the cat"


async def test_stop_string_counts_only_after_min_tokens(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" cat cat cat")
    assert (await harness.complete(stop="cat", min_tokens=1)).json()["choices"][0]["text"] == " cat "


async def test_a_stop_string_that_only_began_is_shown(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = harness.says(" the ca")
    assert (await harness.complete(stop="cat")).json()["choices"][0]["text"] == " the ca"


async def test_stop_token_has_no_text(harness: Harness) -> None:
    decode = await harness.decode()
    tokens = harness.ids(" the cat")
    decode.script = lambda admit: Script([tokens], "stop", stop_token_id=tokens[-1])
    choice = (await harness.complete(stop_token_ids=[tokens[-1]])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" the", "stop", tokens[-1])
    choice = (await harness.complete(stop_token_ids=[tokens[-1]], include_stop_str_in_output=True)).json()["choices"][0]
    assert choice["text"] == " the cat"


async def test_special_tokens_are_shown_if_asked_for(harness: Harness) -> None:
    decode = await harness.decode()
    decode.script = lambda admit: Script([(1, *harness.ids(" cat"))], "length")
    assert (await harness.complete()).json()["choices"][0]["text"] == " cat"
    assert (await harness.complete(skip_special_tokens=False)).json()["choices"][0]["text"] == "<s> cat"


async def test_logprobs(harness: Harness) -> None:
    decode = await harness.decode()
    cat, dog, half = harness.ids(" cat")[0], harness.ids(" dog")[0], harness.ids("é")[0]
    logprobs = [
        TokenLogprob(token_id=cat, logprob=-0.5, top=((cat, -0.5), (dog, -1.0))),
        TokenLogprob(token_id=half, logprob=-3.0, top=((cat, -0.1), (dog, float("-inf")))),
    ]
    decode.script = lambda admit: Script([(cat,), (half,)], "length", logprobs=logprobs)
    choice = (await harness.complete(max_tokens=2, logprobs=2)).json()["choices"][0]
    half_text = "bytes:\\xc3"
    assert choice["logprobs"] == {
        "text_offset": [0, len(" cat")],
        "token_logprobs": [-0.5, -3.0],
        "tokens": [" cat", half_text],
        "top_logprobs": [{" cat": -0.5, " dog": -1.0}, {" cat": -0.1, " dog": -9999.0, half_text: -3.0}],
    }
    assert (await decode.expect(Admit)).sampling.logprobs == 2
    choice = (await harness.complete(max_tokens=2, logprobs=2, return_tokens_as_token_ids=True)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{cat}", f"token_id:{half}"]
