"""The command ``baton-router``: reads the settings, starts the router, says what went wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from protocol.config import RouterSettings, load_settings
from protocol.errors import BatonError, ConfigError
from router.server import Router

EXIT_FAILED = 1
EXIT_WRONG_SETTING = 2

HELP = """Serve the OpenAI API and spread requests over the prefill and decode workers that dial in.

Every option can also stand in the file given with --config or in the environment (BATON_PORT=8000 for --port); options win over the
environment, that wins over the file.

Exit codes: 0 left in good order; 2 a wrong setting, model directory or busy port; 1 anything else.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(help=HELP)
def serve(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint directory: tokenizer, chat template, lengths. No weights are read.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP API. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API; 0 takes a free one. [8000]")] = None,
    control: Annotated[str | None, typer.Option(help="Where workers dial, for instance tcp://0.0.0.0:5550. [tcp://127.0.0.1:5550]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in the API. [the directory's name]")] = None,
    queue_limit: Annotated[int | None, typer.Option(help="Requests that may wait for room; more are answered 429. [256]")] = None,
    request_timeout_s: Annotated[float | None, typer.Option(help="Longest time from arrival to the last token. [600]")] = None,
    min_prefill: Annotated[int | None, typer.Option(help="Prefill workers without which /ready says no. [0]")] = None,
    min_decode: Annotated[int | None, typer.Option(help="Decode workers without which /ready says no. [1]")] = None,
    local_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompts up to this length are prefilled by the decode worker itself. [0]")
    ] = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="After SIGTERM: how long running requests may go on. [30]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these settings.")] = None,
) -> None:
    flags = {key: value for key, value in locals().items() if key != "config"}
    try:
        settings = load_settings(RouterSettings, "router", flags, config, os.environ)
        _start_logging(settings.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except ConfigError as error:
        print(f"baton-router: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_WRONG_SETTING) from None
    except (BatonError, OSError) as error:
        print(f"baton-router: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


async def _run(settings: RouterSettings) -> None:
    router = Router(settings)
    gc.freeze()  # what is here now stays; the collector needn't look at it for every burst of tokens
    await router.run()


def _start_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


def main() -> None:
    app(prog_name="baton-router")


if __name__ == "__main__":
    main()
