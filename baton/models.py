"""Which checkpoint a command means."""

from __future__ import annotations

from pathlib import Path

import demo


def resolve_model(given: Path | None) -> Path:
    """The given directory or the shipped one. ValueError when it isn't a checkpoint directory."""
    path = given if given is not None else demo.CHECKPOINT
    if not path.is_dir():
        raise ValueError(f"model={path}: no such directory")
    if not (path / "config.json").is_file():
        raise ValueError(f"model={path}: not a checkpoint directory, config.json is missing")
    return path.resolve()
