"""The checkpoint's chat template: messages to a prompt, in a sandbox, with the helpers that templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError
from router.tokenizer import read_json

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What templates run into when they don't get what they expect."""
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class TemplateRefused(ValueError):
    """The template says no to these messages, or can't cope with them."""


class ChatTemplate:
    """``chat_template.jinja``, or the key ``chat_template`` of ``tokenizer_config.json``."""

    def __init__(self, templates: Mapping[str, jinja2.Template], named_tokens: Mapping[str, str], *, knows_developer: bool) -> None:
        self._templates = templates
        self._named_tokens = named_tokens
        self._knows_developer = knows_developer
        self.reserved = frozenset({"self", "messages", "tools", "documents", *_environment().globals})
        """Names that ``extra`` can't have."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateRefused. ``extra`` are switches: ``add_generation_prompt``, else on, and the template's own, such as
        ``enable_thinking``. The role "developer", which is newer than most templates, is "system" for those that don't know it.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        told = messages if self._knows_developer else [_without_developer(message) for message in messages]
        given = {"messages": told, "tools": tools, "documents": None}
        try:
            return self._templates[name].render({"add_generation_prompt": True, **self._named_tokens, **(extra or {}), **given})
        except _FAULTS as error:
            raise TemplateRefused(f"the chat template can't render these messages: {error}") from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """None: the checkpoint has no template, so it doesn't chat. Raises ConfigError that names the file."""
    config = read_json(directory / CONFIG_FILE)
    path = directory / TEMPLATE_FILE
    source: object = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    origin = str(path if path.is_file() else directory / CONFIG_FILE)
    if source is None:
        return None
    sources = _by_name(source, origin)
    knows_developer = any("developer" in text for text in sources.values())
    return ChatTemplate(_compile(sources, origin), _named_tokens(config), knows_developer=knows_developer)


def _by_name(source: object, origin: str) -> dict[str, str]:
    """One template, or a list of {name, template}."""
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list) and all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in source):
        templates = {str(entry["name"]): str(entry["template"]) for entry in source}
        if "default" in templates:
            return templates
    raise ConfigError(f"{origin}: chat_template is neither a template nor a list of named templates with a 'default'")


def _compile(sources: Mapping[str, str], origin: str) -> dict[str, jinja2.Template]:
    environment = _environment()
    try:
        return {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{origin}: the chat template is wrong at line {error.lineno}: {error.message}") from None


def _without_developer(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes for HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    content: Callable[[Any], Any] = lambda token: token.get("content") if isinstance(token, dict) else token  # noqa: E731
    found = {name: content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in found.items() if isinstance(token, str)}
