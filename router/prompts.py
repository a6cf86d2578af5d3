"""What a request asks the model to continue: text or tokens in, checked tokens out. Too long ones are found before any work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.bodies import ChatBody, CompletionBody, TokenizeBody
from router.chat_template import TemplateRefused
from router.errors import ApiError, invalid, unsupported
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
    messages = [_message(message, f"messages.{place}") for place, message in enumerate(body.messages)]
    try:
        text = files.chat_template.render(
            messages, tools=tools, add_generation_prompt=body.add_generation_prompt is not False, extra=body.chat_template_kwargs
        )
    except TemplateRefused as error:
        raise invalid("messages", str(error)) from None
    return await _prompt(text, "messages", files, max_model_len, body.add_special_tokens is True)


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
            raise invalid(param, f"{param}: {token_id} is not a token id of this model (0 to {vocab_size - 1})")


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


# ---- chat messages ---------------------------------------------------------------------------------------------------


def _message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    """As templates expect it: content is text, arguments of tool calls are objects. Other fields go to the template as they are."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{param}.role", f"{param}.role={role!r} is not a role")
    known = {**message, "content": _content(message.get("content"), f"{param}.content")}
    if "tool_calls" in message:
        known["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    if known["content"] is None and not known.get("tool_calls"):
        raise invalid(f"{param}.content", f"{param}.content is missing")
    return known


def _content(content: object, param: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, f"{param} is neither text nor a list of parts")
    return "\n".join(_text_part(part, f"{param}.{place}") for place, part in enumerate(content))


def _text_part(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text"):
        raise unsupported(param, f"content of type {kind!r} is not served, only 'text'")
    assert isinstance(part, dict)
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{param}.text", f"{param}.text is not text")
    return text


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise invalid(param, f"{param} is not a list")
    return [_tool_call(call, f"{param}.{place}") for place, call in enumerate(calls)]


def _tool_call(call: object, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{param}.function", f"{param}.function needs a name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise invalid(f"{param}.function.arguments", f"{param}.function.arguments is not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
