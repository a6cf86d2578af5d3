"""``baton doctor``: what is installed, what would be chosen and why, and how fast the link really is."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.console import EXIT_FAILURE, cores, err, out

PACKAGES = ("baton-serve", "torch", "ucxx-cu13", "libucx-cu13", "pyzmq", "msgpack", "pydantic", "fastapi", "uvicorn", "tokenizers", "numpy")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    link: Annotated[bool, typer.Option(help="Measure the link (some seconds).")] = True,
) -> None:
    report: dict[str, Any] = {"machine": _machine(), "packages": _packages(), "kernels": _kernels()}
    if link:
        err.print("[dim]measuring the link between two processes …[/dim]")
        report["link"] = _link()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    if report.get("link", {}).get("warning"):
        raise typer.Exit(EXIT_FAILURE)


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": str(cores()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "c compiler": shutil.which("cc") or "none (only needed to build the native kernels)",
    }


def _packages() -> dict[str, str]:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {name: of(name) for name in PACKAGES}


def _kernels() -> dict[str, str]:
    from kernels import select

    chosen = select("auto")
    return {"chosen": chosen.name, "reason": chosen.reason}


def _link() -> dict[str, float | str]:
    from transfer.bench import selftest

    report = asyncio.run(selftest())
    told = {"warning": report.warning} if report.warning else {}
    return {"hand-off GB/s": report.ucx, "plain socket GB/s": report.socket, "ratio": report.ratio} | told


def _show(report: dict[str, Any]) -> None:
    for title, rows in report.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for key, value in rows.items():
            style = "bold yellow" if key == "warning" else ""
            table.add_row(key, f"{value:.2f}" if isinstance(value, float) else str(value), style=style)
        out.print(table)
        out.print()
