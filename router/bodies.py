"""Request bodies of the OpenAI API and its common extensions. Types are checked here, ranges by protocol.sampling.

Unknown fields are accepted. A known field whose value Baton can't honour, and which would change the answer, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from router.errors import ApiError, from_validation, invalid, unsupported
from router.json_text import shown

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_SALT_LENGTH = 256


class Part(BaseModel):
    """Strict: "5" is not a number, 1.5 not a count. No unions but with None: errors in them would name the parts of our types."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class Body(Part):
    model: str | None = None


BodyT = TypeVar("BodyT", bound=Body)


def _as_texts(given: object) -> object:
    """One is as good as a list of one."""
    if isinstance(given, str):
        return [given]
    if given is not None and not isinstance(given, list):
        raise ValueError("it must be a string or an array of strings")
    return given


Texts = Annotated[list[str] | None, BeforeValidator(_as_texts, json_schema_input_type=str | list[str] | None)]


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chat have in common. None means not given, as in clients that send every field."""

    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Texts = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_LENGTH)
    """Only requests with the same one share cached prefixes."""
    cache_prompt: bool | None = None
    """False: this request neither uses cached prefixes nor leaves any."""


class CompletionBody(GenerationBody):
    prompt: Any
    """Text, token ids, or a list of either; taken apart in router.prompts."""
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """Either ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]


_NOT_SERVED = "is not served"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (False,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 1.0),
}
"""Fields of others, with the values that ask for nothing; null always does."""

COMPLETION_NEUTRAL = _NEUTRAL | {"suffix": ("",)}
CHAT_NEUTRAL = _NEUTRAL | {
    "suffix": ("",),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "audio": (),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
}


def parse_body(cls: type[BodyT], raw: object, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> BodyT:
    """Raises ApiError that names the field."""
    if not isinstance(raw, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    for field, values in (neutral or {}).items():
        value = raw.get(field)
        if value is not None and not any(value == wanted and type(value) is type(wanted) for wanted in values):
            raise unsupported(field, f"{shown(value)} {_NOT_SERVED}" + (f"; only {', '.join(map(shown, values))}" if values else ""))
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """Raises ApiError."""
    stops = body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings, at most {MAX_STOPS} are possible")
    if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise invalid("stop", f"stop strings have 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)
