"""Report B's bounded reproducer: eight requests meet one that speculates steadily, K = 5, all rows of one shape.

    python -m tests.reproductions.bounded [--model DIR] [--before test|read|replace]

Each answer is compared with what the same prompt gives alone, without speculation. With our policies none may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from baton.models import resolve_model
from engine import Engine, SamplingParams
from engine.policies import OURS, Policies
from engine.tokenizer import load_tokenizer
from loadgen.swe.expert import expert_messages
from loadgen.swe.instance import make_instance
from loadgen.swe.tools import TOOLS
from router.chat_template import load_chat_template
from tests.reproductions.padded_tail import STALE, ZEROS

Tokens = Sequence[int]

SPECULATION = 5
NUM_REQUESTS = 8
STEADY_PIECES = 3
"""The others come when the steady request has been in this many windows."""


def answers_alone(model: Path, prompts: Sequence[Tokens], max_tokens: int, **settings: Any) -> Sequence[Tokens]:
    """One after the other, without speculation. ``settings`` are EngineConfig's."""
    with Engine(model, speculation=0, **settings) as engine:
        return [engine.generate([prompt], _params(max_tokens))[0].token_ids for prompt in prompts]


def answers_met(
    model: Path, steady: Tokens, prompts: Sequence[Tokens], policies: Policies, max_tokens: int, **settings: Any
) -> Sequence[Tokens]:
    """All at once beside one that speculates all the time. Raises AssertionError when that one ends before the others have."""
    with Engine(model, speculation=SPECULATION, policies=policies, **settings) as engine:
        stream = engine.stream([steady], _params(engine.core.capacity.max_model_len - len(steady)))
        assert len(list(islice(stream, STEADY_PIECES))) == STEADY_PIECES, "the steady request has ended"
        met = [done.token_ids for done in engine.generate(prompts, _params(max_tokens))]
        assert next(stream).completion is None, "the steady request has ended"
        return met


def first_others(alone: Sequence[Tokens], met: Sequence[Tokens]) -> list[int | None]:
    """Per request the index of its first token that differs; None when the answer is the same."""
    return [
        next((index for index, (ours, theirs) in enumerate(zip(*answers, strict=True)) if ours != theirs), None)
        for answers in zip(alone, met, strict=True)
    ]


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint with tokenizer and chat template; default: the shipped model")
    parser.add_argument("--before", choices=("test", "read", "replace"), default="read", help="the call that the answers have to make")
    parser.add_argument("--max-tokens", type=int, default=40)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    steady, *prompts = (_agent_prompt(model, seed, arguments.before) for seed in range(NUM_REQUESTS + 1))
    alone = answers_alone(model, prompts, arguments.max_tokens)
    for name, policies in (
        ("ours", OURS),
        ("padded tail as prefill, placeholders read 0", ZEROS),
        ("padded tail as prefill, placeholders read stale drafts", STALE),
    ):
        others = first_others(alone, answers_met(model, steady, prompts, policies, arguments.max_tokens))
        corrupted = sum(index is not None for index in others)
        print(f"{name}: {corrupted} of {NUM_REQUESTS} differ from alone; index of the first other token: {others}")


def _agent_prompt(model: Path, seed: int, before: str) -> list[int]:
    """A conversation of the agent up to its first call of the tool ``before``."""
    messages = expert_messages(make_instance(seed))
    end = next(index for index, message in enumerate(messages) for call in message.get("tool_calls", ()) if _name(call) == before)
    template, tokenizer = load_chat_template(model), load_tokenizer(model)
    assert template is not None, f"{model} has no chat template"
    assert tokenizer is not None, f"{model} has no tokenizer"
    ids: list[int] = tokenizer.encode(template.render(messages[:end], tools=TOOLS)).ids
    return ids


def _name(call: Mapping[str, Any]) -> str:
    name: str = call["function"]["name"]
    return name


if __name__ == "__main__":
    main()
