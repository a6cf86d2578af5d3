"""The checkpoint's template in its sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from router.chat_template import ChatTemplate, TemplateRefused, load_chat_template

USER = [{"role": "user", "content": "hi"}]


def template(directory: Path, source: Any, **config: Any) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    found = load_chat_template(directory)
    assert found is not None
    return found


def test_template_from_the_tokenizer_config_knows_the_special_tokens(tmp_path: Path) -> None:
    found = template(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token={"content": "</s>"})
    assert found.render(USER, tools=None) == "<s>hi</s>"


def test_the_file_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert template(tmp_path, "from the config").render(USER, tools=None) == "from the file"


def test_named_templates(tmp_path: Path) -> None:
    found = template(tmp_path, [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    assert found.render(USER, tools=None) == "d"
    assert found.render(USER, tools=[{"type": "function"}]) == "t"


def test_a_template_that_knows_developers_gets_them(tmp_path: Path) -> None:
    told = [{"role": "developer", "content": "hi"}]
    assert template(tmp_path, "{{ messages[0].role }}").render(told, tools=None) == "system"
    assert template(tmp_path, "{% if 'developer' %}{{ messages[0].role }}{% endif %}").render(told, tools=None) == "developer"


def test_no_template_is_no_error(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None


def test_helpers(tmp_path: Path) -> None:
    found = template(tmp_path, "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}{% generation %}x{% endgeneration %}{{ mood }}")
    assert found.render(USER, tools=None, extra={"mood": "!"}) == '{"a": "<é>"}4x!'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_templates_that_refuse_fail_or_escape(tmp_path: Path, source: str) -> None:
    with pytest.raises(TemplateRefused):
        template(tmp_path, source).render(USER, tools=None)


@pytest.mark.parametrize("source", ["{% if %}", 7, [{"name": "other", "template": "x"}]])
def test_a_wrong_template_is_a_wrong_checkpoint(tmp_path: Path, source: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer_config"):
        template(tmp_path, source)
