"""Lines from the keyboard, with editing and the lines of earlier sessions; from a pipe, as they are."""

from __future__ import annotations

import os
import readline
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.console import out

MAX_LINES = 2000
"""Kept of earlier sessions."""


def state_file(name: str) -> Path:
    """Where a user's state belongs (XDG)."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "baton" / name


class LineInput:
    """``words`` are completed by Tab at a line's beginning. Raises OSError when the history can't be read or made."""

    def __init__(self, history: Path, words: Sequence[str]) -> None:
        self._history = history
        self._words = words
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if not self.is_terminal:
            return
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.touch(mode=0o600)
        readline.set_history_length(MAX_LINES)
        readline.read_history_file(history)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")

    def read(self, prompt: str) -> str:
        """One line. A backslash at its end takes the next one along. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        line = self._read_one(prompt)
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._read_one('… ')}"
        return line

    def _read_one(self, prompt: str) -> str:
        if not self.is_terminal:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\n")
        line = input(prompt)
        if line:
            readline.append_history_file(1, self._history)
        return line

    def _complete(self, text: str, state: int) -> str | None:
        fitting = [word for word in self._words if word.startswith(text)] if readline.get_begidx() == 0 else []
        return fitting[state] if state < len(fitting) else None


def coloured(text: str, code: int) -> str:
    """For a prompt: the editor must know which characters take no room."""
    return text if out.color_system is None or out.no_color else f"\001\033[1;{code}m\002{text}\001\033[0m\002"
