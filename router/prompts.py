"""What a request asks the model to continue: text or tokens in, checked tokens out. Too long ones are found before any work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.bodies import ChatBody, CompletionBody, TokenizeBody
from router.chat_messages import check_tools, checked_message
from router.chat_template import TemplateRefused
from router.errors import ApiError, invalid, unsupported
from router.json_text import shown
from router.model_files import ModelFiles

LONG_TEXT = 20_000
"""Characters from which on tokenising leaves the event loop for a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None
    """None: it came as tokens."""


async def completion_prompts(body: CompletionBody, files: ModelFiles, max_model_len: int) -> list[Prompt]:
    """Raises ApiError."""
    special = body.add_special_tokens is not False
    return [await _prompt(given, "prompt", files, max_model_len, special) for given in _split(body.prompt)]


async def chat_prompt(body: ChatBody | TokenizeBody, files: ModelFiles, max_model_len: int, tools: list[dict[str, Any]] | None) -> Prompt:
    """Raises ApiError."""
    if files.chat_template is None:
        raise unsupported("messages", "this checkpoint has no chat template; use /v1/completions")
    assert body.messages is not None
    messages = [checked_message(message, f"messages.{place}") for place, message in enumerate(body.messages)]
    check_tools(body.tools or ())
    extra = dict(body.chat_template_kwargs or {})
    _check_switches(extra, files.chat_template.reserved)
    if body.add_generation_prompt is not None:
        extra["add_generation_prompt"] = body.add_generation_prompt
    try:
        text = files.chat_template.render(messages, tools=tools, extra=extra)
    except TemplateRefused as error:
        raise invalid("messages", str(error)) from None
    return await _prompt(text, "messages", files, max_model_len, body.add_special_tokens is True)


def _check_switches(extra: dict[str, Any], reserved: frozenset[str]) -> None:
    """Raises ApiError: what the template gets otherwise can't be given as a switch of its own too."""
    for name in extra:
        if name in reserved:
            raise invalid(f"chat_template_kwargs.{name}", f"chat_template_kwargs: {shown(name)} is not a switch of the template")
    if not isinstance(extra.get("add_generation_prompt", True), bool):
        raise invalid("chat_template_kwargs.add_generation_prompt", "chat_template_kwargs.add_generation_prompt must be true or false")


async def tokenize_text(text: str, files: ModelFiles, *, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG_TEXT:
        return files.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(files.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def too_long(param: str, max_model_len: int, wanted: str) -> ApiError:
    message = f"this model's context is {max_model_len} tokens, prompt and output together, but {wanted}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


async def _prompt(given: str | list[int], param: str, files: ModelFiles, max_model_len: int, special: bool) -> Prompt:
    if isinstance(given, str):
        if len(given) > max_model_len * files.tokenizer.longest_token:
            raise too_long(param, max_model_len, f"the prompt has {len(given)} characters")
        token_ids = await tokenize_text(given, files, add_special_tokens=special)
        text: str | None = given
    else:
        token_ids, text = given, None
        check_token_ids(token_ids, param, files.vocab_size)
    if not token_ids:
        raise invalid(param, f"{param} is empty: there is no token to begin with")
    if len(token_ids) >= max_model_len:
        raise too_long(param, max_model_len, f"the prompt has {len(token_ids)} tokens and leaves no room for an answer")
    return Prompt(tuple(token_ids), text)


def check_token_ids(token_ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raises ApiError."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(param, f"{param}: {shown(token_id)} is not a token id of this model (0 to {vocab_size - 1})")


def _split(prompt: object) -> list[str | list[int]]:
    """The prompts of a batch, or the one."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", "prompt is text, a list of token ids, or a list of such prompts, and not empty")
    if _are_ids(prompt):
        return [prompt]
    for place, entry in enumerate(prompt):
        if not isinstance(entry, str) and not (isinstance(entry, list) and entry and _are_ids(entry)):
            raise invalid(f"prompt.{place}", f"prompt.{place} is neither text nor a list of token ids")
    return prompt


def _are_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)
