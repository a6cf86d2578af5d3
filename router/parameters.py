"""From a request's fields to how one sequence is generated. Defaults are OpenAI's: temperature 1, and 16 tokens for completions."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from protocol.messages import CacheUse
from protocol.sampling import SamplingParams
from router.bodies import ChatBody, CompletionBody, GenerationBody, stop_strings
from router.errors import from_validation, invalid
from router.json_text import shown
from router.model_files import ModelFiles
from router.prompts import Prompt, check_token_ids, too_long

COMPLETION_TOKENS = 16
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
"""As JSON writes numbers, so that two keys are two tokens."""
_RANGED_BY_SAMPLING = ("temperature", "top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What the router does with the tokens of a sequence."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    ending_ids: frozenset[int]
    """A token that ends the sequence: it has no text, unless ``include_stop``."""
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, body: GenerationBody, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> TextRules:
        return cls(
            stops=stop_strings(body),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            ending_ids=ending_ids(sampling, eos_token_ids),
            min_tokens=sampling.min_tokens,
            max_tokens=sampling.max_tokens,
        )


def sampling_params(body: CompletionBody | ChatBody, prompt: Prompt, files: ModelFiles, max_model_len: int) -> SamplingParams:
    """Raises ApiError that names the field as the client called it."""
    values: dict[str, Any] = {name: value for name in _RANGED_BY_SAMPLING if (value := getattr(body, name)) is not None}
    values.setdefault("temperature", 1.0)
    values["max_tokens"] = _max_tokens(body, len(prompt.token_ids), max_model_len)
    if body.min_tokens is not None and body.min_tokens > values["max_tokens"]:
        raise invalid("min_tokens", f"min_tokens={shown(body.min_tokens)} is more than {_max_tokens_name(body)}={values['max_tokens']}")
    values["top_k"] = min(max(0, body.top_k or 0), files.vocab_size)  # -1 means all, like 0 and everything from vocab_size on
    values["seed"] = secrets.randbits(63) if body.seed is None else body.seed % 2**63
    values["ignore_eos"] = bool(body.ignore_eos)
    values["logit_bias"] = _logit_bias(body, files.vocab_size)
    values["logprobs"] = _logprobs(body)
    check_token_ids(body.stop_token_ids or (), "stop_token_ids", files.vocab_size)
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    try:
        sampling = SamplingParams(**values)
    except ValidationError as error:
        names = {"max_tokens": _max_tokens_name(body), "logprobs": "top_logprobs" if isinstance(body, ChatBody) else "logprobs"}
        raise from_validation(error, names) from None
    if sampling.min_tokens and len(ending_ids(sampling, files.eos_token_ids)) >= files.vocab_size:
        raise invalid("stop_token_ids", "stop_token_ids: every token would end the sequence, so min_tokens leaves none to choose")
    return sampling


def cache_use(body: GenerationBody) -> CacheUse:
    return CacheUse(enabled=body.cache_prompt is not False, salt=body.cache_salt)


def ending_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)


def nth(sampling: SamplingParams, index: int) -> SamplingParams:
    """For choice ``index`` of n: its own seed, the first one's is the request's."""
    return sampling.model_copy(update={"seed": (sampling.seed + index) % 2**63}) if index else sampling


def _max_tokens_name(body: GenerationBody) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, max_model_len: int) -> int:
    """The newer name wins when both are given. Not given: what fits, for completions at most 16."""
    room = max_model_len - num_prompt_tokens
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is None:
        return min(room, COMPLETION_TOKENS) if isinstance(body, CompletionBody) else room
    if wanted > room:
        name = _max_tokens_name(body)
        raise too_long(name, max_model_len, f"{num_prompt_tokens} are in the prompt and {name}={shown(wanted)} were asked for")
    return wanted


def _logit_bias(body: GenerationBody, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(f"logit_bias.{key}", f"logit_bias: {shown(key)} is not a token id")
        check_token_ids([int(key)], "logit_bias", vocab_size)
        biases[int(key)] = bias
    return biases


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    return (body.top_logprobs or 0) if body.logprobs else None
