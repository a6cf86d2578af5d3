"""Chat messages and tools as clients send them, checked and in the form that templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import invalid, missing, unsupported
from router.json_text import parse_json, shown


def checked_message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Content is text then, arguments of tool calls are objects; other fields go to the template as they are. Raises ApiError."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{param}.role", f"{param}.role={shown(role)} is not a role")
    _check_text(message, "tool_call_id", param)
    _check_text(message, "name", param)
    known = {**message, "content": _content(message.get("content"), f"{param}.content")}
    if "tool_calls" in message:
        known["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    if known["content"] is None and not known.get("tool_calls"):
        raise missing(f"{param}.content")
    return known


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError."""
    for place, tool in enumerate(tools):
        param = f"tools.{place}"
        _check_kind(tool, param, required=True)
        function = _object(tool, "function", param)
        _check_name(function, f"{param}.function")
        _check_text(function, "description", f"{param}.function")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(f"{param}.function.parameters", f"{param}.function.parameters={shown(parameters)} is not an object")


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
        raise unsupported(param, f'content of type {shown(kind)} is not served, only "text"')
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
    if not isinstance(call, dict):
        raise invalid(param, f"{param}={shown(call)} is not an object")
    _check_text(call, "id", param)
    _check_kind(call, param, required=False)
    function = _object(call, "function", param)
    _check_name(function, f"{param}.function")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, param: str) -> object:
    """Text is JSON of any kind: it is what the model wrote. None and "" are no arguments."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            return parse_json(arguments)
        except ValueError as error:
            raise invalid(param, f"{param} is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise invalid(param, f"{param}={shown(arguments)} is neither JSON text nor an object")
    return arguments


# ---- fields of objects that no model class describes, because templates get them as they came


def _check_kind(owner: Mapping[str, Any], param: str, *, required: bool) -> None:
    kind = owner.get("type")
    if kind is None and required:
        raise missing(f"{param}.type")
    if kind not in (None, "function"):
        raise unsupported(f"{param}.type", f'{shown(kind)} is not served, only "function"')


def _object(owner: Mapping[str, Any], key: str, param: str) -> Mapping[str, Any]:
    value = owner.get(key)
    if value is None:
        raise missing(f"{param}.{key}")
    if not isinstance(value, dict):
        raise invalid(f"{param}.{key}", f"{param}.{key}={shown(value)} is not an object")
    return value


def _check_name(function: Mapping[str, Any], param: str) -> None:
    name = function.get("name")
    if name is None:
        raise missing(f"{param}.name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{param}.name", f"{param}.name={shown(name)} is not a name")


def _check_text(owner: Mapping[str, Any], key: str, param: str) -> None:
    """It may also be absent."""
    value = owner.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{param}.{key}", f"{param}.{key}={shown(value)} is not text")
