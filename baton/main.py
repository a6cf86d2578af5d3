"""The ``baton`` command: one typer app, one module per subcommand. Heavy imports happen inside the commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from baton import audit, bench, chat, demo, doctor, generate, probe, up

app = typer.Typer(
    name="baton",
    help="Serve hybrid language models with prefill and decode apart, and recurrent state that can be trusted.\n\n"
    "Start with [bold]baton demo[/bold]; then [bold]baton up --model DIR[/bold] and [bold]baton chat[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(version("baton-serve"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)] = False,
) -> None:
    pass


app.command("up", help="Start a local cluster and keep it running until Ctrl-C.")(up.command)
app.command("demo", help="Start a local cluster on the shipped model and let an agent fix a bug in it.")(demo.command)
app.command("chat", help="Talk to a cluster of its own, or to any server, on the terminal.")(chat.command)
app.command("generate", help="Answer prompts in this single process, without any server.")(generate.command)
app.command("audit", help="Show what a running cluster's state audit has found. Exit code 1: it found something; 2: it can't be asked.")(
    audit.command
)
app.command("doctor", help="Show versions, kernels and transports, and measure the link that a hand-off would take.")(doctor.command)
app.add_typer(probe.app, name="probe", help="Look at the states themselves.")
app.add_typer(bench.app, name="bench", help="Measure on this machine; every figure comes with its spread.")


def main() -> None:
    app()
