"""When a sequence ends. Looked at token by token, so that a window of several tokens ends where single steps would."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishDecision:
    reason: Literal["stop", "length"]
    stop_token_id: int | None = None
    """The token that ended it, for ``stop``. It is the last of the output and counts as one of its tokens."""


def ending_tokens(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end this sequence: its stop ids, and EOS unless it is to be ignored."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


def finish_reason(params: SamplingParams, eos_token_ids: Collection[int], output: Sequence[int]) -> FinishDecision | None:
    """Whether the sequence ends with the last token of ``output``. A stop token at max_tokens counts as a stop."""
    if not output:
        return None
    if len(output) > params.min_tokens and output[-1] in ending_tokens(params, eos_token_ids):
        return FinishDecision(reason="stop", stop_token_id=output[-1])
    return FinishDecision(reason="length") if len(output) >= params.max_tokens else None


def cut_at_finish(
    params: SamplingParams, eos_token_ids: Collection[int], output_so_far: Sequence[int], new_tokens: Sequence[int]
) -> tuple[list[int], FinishDecision | None]:
    """``new_tokens`` up to and with the first one that ends the sequence, and that ending if there is one."""
    output = list(output_so_far)
    for count, token in enumerate(new_tokens, start=1):
        output.append(token)
        decision = finish_reason(params, eos_token_ids, output)
        if decision is not None:
            return list(new_tokens[:count]), decision
    return list(new_tokens), None
