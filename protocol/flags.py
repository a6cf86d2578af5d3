"""A command line made from a settings class: one option per field, with the field's docstring as its help."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from protocol.config import CONFIG_VARIABLE, HIDDEN, Process, Settings, load_settings
from protocol.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=Settings)

EXIT_WRONG_SETTING = 2
METAVARS: dict[object, str] = {int: "INT", float: "NUM", Path: "PATH", str: "TEXT"}


def settings_app(name: str, about: str, cls: type[SettingsT], process: Process, run: Callable[[SettingsT], int]) -> typer.Typer:
    """The app of one process: reads flags, ``BATON_*`` and the TOML file, then exits with what ``run`` returns.

    A wrong setting ends it with one line on standard error and exit code 2.
    """

    def command(**given: Any) -> None:
        config = given.pop("config")
        try:
            settings = load_settings(cls, process, given, config, os.environ)
        except ConfigError as error:
            print(f"{name}: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_WRONG_SETTING) from None
        raise typer.Exit(run(settings))

    parameters = [_parameter(key, field) for key, field in cls.model_fields.items()]
    help_text = f"TOML file; flags and BATON_* variables win over it. Also {CONFIG_VARIABLE}."
    config_option = typer.Option("--config", help=help_text, show_default=False)
    parameters.append(_keyword("config", Annotated[Path | None, config_option]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(name=name, add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=f"{about}\n\nEvery option can also be set as BATON_<OPTION> or in a TOML file; a flag wins.")(command)
    return app


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    """Values stay text here, so that flags, environment and file are checked by the same code and fail with the same words."""
    flag = f"--{key.replace('_', '-')}"
    kind = _plain(field.annotation)
    about = _help(field)
    if kind is bool:
        return _keyword(key, Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=about, show_default=False)])
    metavar = "CHOICE" if get_origin(kind) is Literal else METAVARS[kind]
    hidden = HIDDEN in field.metadata
    return _keyword(key, Annotated[str | None, typer.Option(flag, help=about, metavar=metavar, show_default=False, hidden=hidden)])


def _help(field: FieldInfo) -> str:
    about = (field.description or "").replace("``", "")
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        about = f"{about} One of {', '.join(get_args(kind))}."
    if field.is_required():
        return f"{about} Required."
    return about if field.default is None or isinstance(field.default, bool) else f"{about} Default {field.default}."


def _plain(annotation: object) -> Any:
    """The bare type behind ``Annotated`` and ``| None``."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if isinstance(annotation, type):
        return annotation
    if get_origin(annotation) is not Literal:
        members = [arg for arg in get_args(annotation) if arg is not NoneType]
        assert get_origin(annotation) is Union or hasattr(annotation, "__args__"), f"no flag for a {annotation}"
        return _plain(members[0])
    return annotation
