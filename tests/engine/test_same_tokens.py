"""The promise: no feature and no accident changes a token. Greedy and sampled, against a plain engine with everything off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.request import EngineRequest, FinishedEvent, TokensEvent
from tests.engine.engine_kit import KERNELS, Drive, MakeCore, Told, assert_whole, key, poison, prompt, request

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 9, 13, 16, 17, 31)
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}


def mixed(output: int = 12, **params: Any) -> list[EngineRequest]:
    """Prompts around block borders and around window widths, greedy and sampled in turn."""
    return [request(i, prompt(length, i), max_tokens=output, **(params or (GREEDY, SAMPLED)[i % 2])) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(make_core: MakeCore) -> list[list[int]]:
    """One request at a time, one token at a time, whole prompts, no speculation, no padding, roomy pools."""
    outputs = []
    for each in mixed():
        core = make_core(speculation=0, tail_padding="never", max_prefill_chunk=256)
        outputs += Drive(core).outputs([each])
    return outputs


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("speculation", [0, 1, 3, 5, 7])
def test_speculation(make_core: MakeCore, expected: list[list[int]], kernels: str, speculation: int) -> None:
    core = make_core(speculation=speculation, kernels=kernels)
    poison(core)
    assert Drive(core).outputs(mixed()) == expected
    if speculation:
        assert core.counters()["baton_accepted_drafts_total"] > 0.1 * core.counters()["baton_proposed_drafts_total"] > 0


@pytest.mark.parametrize("padding", ["auto", "always", "never"])
@pytest.mark.parametrize("speculation", [0, 4])
def test_tail_padding(make_core: MakeCore, expected: list[list[int]], padding: str, speculation: int) -> None:
    core = make_core(speculation=speculation, tail_padding=padding)
    poison(core)
    assert Drive(core).outputs(mixed()) == expected


@pytest.mark.parametrize(("chunk", "budget"), [(1, 4), (3, 64), (5, 11), (256, 7)])
def test_chunks_and_budgets(make_core: MakeCore, expected: list[list[int]], chunk: int, budget: int) -> None:
    core = make_core(speculation=3, max_prefill_chunk=chunk, step_tokens=budget)
    poison(core)
    assert Drive(core).outputs(mixed()) == expected


@pytest.mark.parametrize("block_tokens", [1, 7, 32])
def test_block_sizes(make_core: MakeCore, expected: list[list[int]], block_tokens: int) -> None:
    assert Drive(make_core(speculation=3, block_tokens=block_tokens, kv_blocks=600 // block_tokens + 20)).outputs(mixed()) == expected


@pytest.mark.parametrize(("blocks", "slots"), [(13, 40), (18, 40), (40, 11)])
@pytest.mark.parametrize("speculation", [0, 3])
def test_tiny_pools(make_core: MakeCore, expected: list[list[int]], speculation: int, blocks: int, slots: int) -> None:
    core = make_core(speculation=speculation, kv_blocks=blocks, state_slots=slots, max_prefill_chunk=4)
    poison(core)
    assert Drive(core).outputs(mixed()) == expected
    assert blocks > 20 or core.counters()["baton_preemptions_total"] > 0


def test_preemption_again_and_again_gives_no_gap_and_no_repeat(make_core: MakeCore, expected: list[list[int]]) -> None:
    """A block per token, and room for one long request: whoever grows puts somebody out."""
    core = make_core(speculation=3, block_tokens=1, kv_blocks=44)
    poison(core)
    assert Drive(core).outputs(mixed()) == expected
    assert core.counters()["baton_preemptions_total"] > 5


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_and_go_at_random_steps(make_core: MakeCore, expected: list[list[int]], seed: int) -> None:
    """Arrivals and cancels at random, NaN in whatever is free before each step: who stays gets the same tokens, who goes says
    nothing more, every page is back."""
    draw = random.Random(seed)
    core = make_core(speculation=draw.choice([0, 2, 5]), kv_blocks=draw.choice([14, 25, 60]), step_tokens=draw.choice([8, 64]))
    drive, requests = Drive(core), mixed()
    arrive = {each.key: draw.randrange(25) for each in requests}
    leave = {each.key: arrive[each.key] + draw.randrange(1, 25) for each in draw.sample(requests, 5)}
    gone: dict[Any, Told] = {}
    for step in range(400):
        for each in requests:
            if arrive[each.key] == step:
                core.submit(each)
            if leave.get(each.key) == step and core.cancel(each.key):
                gone[each.key] = Told(tokens=list(drive.told.get(each.key, Told()).tokens))
        poison(core)
        drive.step()
        if step >= 50 and not core.has_work():
            break
    for each, tokens in zip(requests, expected, strict=True):
        told = drive.told.get(each.key, Told())
        if each.key in gone:
            assert not told.endings
            assert told.tokens == gone[each.key].tokens == tokens[: len(told.tokens)]
        else:
            assert told.tokens == tokens
            assert [type(event) for event in told.endings] == [FinishedEvent]
    assert_whole(core)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED | {"logprobs": 3}])
@pytest.mark.parametrize("speculation", [0, 3])
def test_endings_fall_where_single_steps_put_them(make_core: MakeCore, speculation: int, params: dict[str, Any]) -> None:
    """max_tokens of every value, and each output token in turn as the stop token."""
    (whole,) = Drive(make_core()).outputs([request("whole", prompt(5, 2), max_tokens=10, **params)])
    drive = Drive(make_core(speculation=speculation))
    short = [request(f"max{n}", prompt(5, 2), max_tokens=n, **params) for n in range(1, 11)]
    stopped = [request(f"stop{t}", prompt(5, 2), max_tokens=10, stop_token_ids=[t], **params) for t in set(whole)]
    assert drive.outputs(short) == [whole[:n] for n in range(1, 11)]
    assert drive.outputs(stopped) == [whole[: whole.index(t) + 1] for t in set(whole)]
    for each in (*short, *stopped):
        (ending,) = drive.told[each.key].endings
        assert isinstance(ending, FinishedEvent)
        assert (ending.reason, ending.stop_token_id) == (("length", None) if each in short else ("stop", each.sampling.stop_token_ids[0]))
    for event in drive.events:
        if isinstance(event, TokensEvent):
            told = [entry.token_id for entry in event.logprobs] if event.logprobs is not None else None
            assert told == (list(event.token_ids) if "logprobs" in params else None)


def test_eos_ends_a_request_unless_it_is_ignored(make_core: MakeCore) -> None:
    drive = Drive(make_core(speculation=3))
    likes_eos: dict[str, Any] = {"logit_bias": {1: 100.0}, "max_tokens": 9}
    assert drive.outputs([request("eos", prompt(6), ignore_eos=False, **likes_eos)]) == [[1]]
    assert drive.outputs([request("min", prompt(6), ignore_eos=False, min_tokens=4, **likes_eos)])[0][-1] == 1
    assert len(drive.told[key("min")].tokens) == 5
    assert drive.outputs([request("on", prompt(6), **likes_eos)]) == [[1] * 9]


# --- states, not only tokens


def plain_state(make_core: MakeCore, kernels: str, tokens: Sequence[int]) -> torch.Tensor:
    """h(len(tokens)) and hidden tail by one plain prefill, alone."""
    core = make_core(kernels=kernels, speculation=0)
    core.submit(request("plain", tokens, origin="seal"))
    Drive(core).step()
    return core.pools.slots.tensor[core.pools.slots.tags.index(len(tokens))]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("padding", ["auto", "never"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 9, 20])
def test_a_newcomer_beside_steady_speculation(make_core: MakeCore, kernels: str, padding: str, length: int) -> None:
    """F10, C3: after the newcomer's first decode step its state is that of a plain prefill of its N tokens."""
    core = make_core(kernels=kernels, speculation=3, tail_padding=padding)
    drive = Drive(core)
    core.submit(request("steady", prompt(40), max_tokens=60))
    for _ in range(6):
        drive.step()
    tokens = prompt(length, 3)
    core.submit(request("new", tokens, max_tokens=4))
    while not drive.told.get(key("new"), Told()).tokens:
        drive.step()
    slot = core.pools.slots.tags.index(length)
    expected = plain_state(make_core, kernels, tokens)
    if kernels == "native":
        assert torch.equal(core.pools.slots.tensor[slot], expected)
    torch.testing.assert_close(core.pools.slots.tensor[slot], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("speculation", [0, 3])
def test_mtp_kv_after_n_tokens_is_a_function_of_these_tokens(make_core: MakeCore, speculation: int) -> None:
    """What decoding left in the blocks, MTP's layer included, is what a prefill of the same tokens writes."""
    core = make_core(speculation=speculation)
    drive = Drive(core)
    core.submit(request("decode", prompt(9), max_tokens=30))
    while len(drive.told.get(key("decode"), Told()).tokens) < 20:
        drive.step()
    tokens = [*prompt(9), *drive.told[key("decode")].tokens]
    other = make_core(speculation=0)
    other.submit(request("plain", tokens[:-1], origin="seal"))
    Drive(other).step()
    for layer, first in ((0, 0), (1, 1)):
        got, expected = (made.pools.kv(layer)[1:9].transpose(0, 1).transpose(1, 2).flatten(2, 3) for made in (core, other))
        torch.testing.assert_close(got[:, :, first : len(tokens) - 1], expected[:, :, first : len(tokens) - 1], rtol=1e-4, atol=1e-4)
