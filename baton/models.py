"""Which checkpoint a command means."""

from __future__ import annotations

import json
from pathlib import Path

import demo

SPECULATION = 3
"""K where the checkpoint has MTP and nobody says otherwise."""


def resolve_model(given: Path | None) -> Path:
    """The given directory or the shipped one. ValueError when it isn't a checkpoint directory."""
    path = given if given is not None else demo.CHECKPOINT
    if not path.is_dir():
        raise ValueError(f"model={path}: no such directory")
    if not (path / "config.json").is_file():
        raise ValueError(f"model={path}: not a checkpoint directory, config.json is missing")
    return path.resolve()


def default_speculation(model: Path) -> int:
    """By config.json alone: this runs where torch isn't loaded. ValueError when it can't be read."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return SPECULATION if config.get("num_nextn_predict_layers") else 0
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model={model}: config.json can't be read: {error}") from None
