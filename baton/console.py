"""What all subcommands share: consoles, exit codes, and errors that end a command in one line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from protocol.errors import BatonError, ConfigError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 130
"""By Ctrl-C, as in a shell."""

_UNSEEN = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
)
"""Control characters, with the pictures that stand for them."""

out = Console(highlight=False, emoji=False, soft_wrap=True)
"""Results: what a script may read."""
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
"""Everything else."""


def harmless(text: str) -> str:
    """For text that a model or a program wrote: it can't steer the terminal."""
    return text.translate(_UNSEEN)


def counted(number: int, name: str) -> str:
    """``name`` is the singular."""
    return f"{number} {name}{'' if number == 1 else 's'}"


def fail(message: str, code: int = EXIT_FAILURE) -> NoReturn:
    """Say why in one line on stderr and exit."""
    complain(message)
    sys.exit(code)


def complain(message: str) -> None:
    """Say why in one line on stderr."""
    err.print("error:", style="bold red", end=" ")
    err.print(message, markup=False)


def baton_command() -> str:
    """How the user can call ``baton`` again: the bare name only when the shell would find this one."""
    ours = os.path.join(os.path.dirname(sys.executable), "baton")
    return "baton" if shutil.which("baton") == ours else os.path.relpath(ours)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """Turn user errors into exit code 2 and system errors into 1, each with one line."""
    try:
        yield
    except (ConfigError, ValueError) as error:
        fail(str(error), EXIT_USAGE)
    except BatonError as error:
        fail(str(error), EXIT_FAILURE)
