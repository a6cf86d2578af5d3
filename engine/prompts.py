"""What ``Engine.generate`` accepts, brought into one form before any work. Errors name the argument and the index."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from tokenizers import Tokenizer

from protocol.sampling import SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]


def as_token_ids(prompts: Prompts, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """One tuple of ids per prompt. A single text or a flat list of ids is one prompt. Raises ValueError."""
    return [_token_ids(prompt, i, tokenizer) for i, prompt in enumerate(_as_list(prompts))]


def as_params(params: Params | None, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt; a single one, or none, serves all. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"params: {len(params)} given for {num_prompts} prompts")
    return list(params)


def _as_list(prompts: Prompts) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence)):
        return [prompts]  # type: ignore[list-item]  # a flat list of ids
    return prompts  # type: ignore[return-value]


def _token_ids(prompt: Prompt, i: int, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        try:
            return tuple(index(token) for token in prompt)
        except TypeError:
            raise ValueError(f"prompts[{i}]: neither text nor a list of token ids") from None
    if tokenizer is None:
        raise ValueError(f"prompts[{i}]: text needs a tokenizer.json in the checkpoint directory; give token ids")
    return tuple(tokenizer.encode(prompt).ids)
