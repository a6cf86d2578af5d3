"""Latency and acceptance over time, as a picture. matplotlib is optional: the extra ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.record import Turn

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Before a run, so that it isn't for nothing. Raises ValueError."""
    if path.suffix not in FORMATS:
        raise ValueError(f"plot={path} must end with one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot={path}: there is no such directory")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'baton-serve[bench]'") from None


def plot(path: Path, turns: Sequence[Turn], title: str) -> None:
    """One point per turn, where it began. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    first, gaps, accepted = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    _points(first, [(turn.started_s, 1000 * turn.ttft_s) for turn in turns if turn.ttft_s is not None], "time to first token, ms")
    _points(gaps, [(turn.started_s, 1000 * max(turn.gaps_s)) for turn in turns if turn.gaps_s], "longest gap, ms")
    _points(accepted, [(turn.started_s, turn.tokens_per_step) for turn in turns if turn.tokens_per_step], "tokens per step with drafts")
    accepted.set_xlabel("seconds")
    figure.savefig(path)


def _points(axes, points, label) -> None:  # type: ignore[no-untyped-def]
    axes.plot([x for x, _ in points], [y for _, y in points], ".", markersize=3, alpha=0.6)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
