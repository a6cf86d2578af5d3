"""Report B's bounded reproducer: eight requests meet one that speculates steadily, K = 5, all rows of one shape.

    python -m tests.reproductions.bounded [--model DIR]

Each answer is compared with what the same prompt gives alone, without speculation. With our policies none may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from tests.reproductions.padded_tail import POLICIES

Tokens = Sequence[int]

SPECULATION = 5
NUM_REQUESTS = 8
STEADY_PIECES = 3
"""The others come when the steady request has been in this many windows."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What requests said that met a steady one, beside what they say alone."""

    alone: list[tuple[int, ...]]
    met: list[tuple[int, ...]]

    @property
    def first_other_token(self) -> list[int | None]:
        """Per request: index of the first token that differs; None when the answer is the same."""
        return [_first_other(alone, met) for alone, met in zip(self.alone, self.met, strict=True)]

    @property
    def corrupted(self) -> int:
        return sum(alone != met for alone, met in zip(self.alone, self.met, strict=True))


def meet(model: Path, steady: Tokens, prompts: Sequence[Tokens], policies: Policies, max_tokens: int, **settings: Any) -> Meeting:
    """``settings`` are EngineConfig's. Raises AssertionError when the steady request ends before the others have."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with Engine(model, speculation=0, **settings) as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    with Engine(model, speculation=SPECULATION, policies=policies, **settings) as engine:
        longest = engine.core.capacity.max_model_len - len(steady)
        stream = engine.stream([steady], SamplingParams(max_tokens=longest, ignore_eos=True))
        assert len(list(islice(stream, STEADY_PIECES))) == STEADY_PIECES, "the steady request has ended"
        met = [done.token_ids for done in engine.generate(prompts, params)]
        assert next(stream).completion is None, "the steady request has ended"
    return Meeting(alone, met)


def _first_other(alone: Tokens, met: Tokens) -> int | None:
    return next((index for index, (ours, theirs) in enumerate(zip(alone, met, strict=True)) if ours != theirs), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint with tokenizer and chat template; default: the shipped model")
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    steady, *prompts = (_agent_prompt(model, seed) for seed in range(NUM_REQUESTS + 1))
    for name, policies in (("ours", OURS), ("padded tail as prefill", POLICIES)):
        meeting = meet(model, steady, prompts, policies, arguments.max_tokens)
        print(f"{name}: {meeting.corrupted} of {NUM_REQUESTS} differ from alone; first other token: {meeting.first_other_token}")


def _agent_prompt(model: Path, seed: int) -> list[int]:
    """A conversation of the agent up to where it has to write the fix."""
    messages = expert_messages(make_instance(seed))
    fix = next(index for index, message in enumerate(messages) for call in message.get("tool_calls", ()) if _name(call) == "replace")
    template, tokenizer = load_chat_template(model), load_tokenizer(model)
    assert template is not None, f"{model} has no chat template"
    assert tokenizer is not None, f"{model} has no tokenizer"
    ids: list[int] = tokenizer.encode(template.render(messages[:fix], tools=TOOLS)).ids
    return ids


def _name(call: Mapping[str, Any]) -> str:
    name: str = call["function"]["name"]
    return name


if __name__ == "__main__":
    main()
