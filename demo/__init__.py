"""The shipped checkpoint, its data recipe and the scripts that make it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Directory of the shipped model."""
