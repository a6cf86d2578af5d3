"""The command ``baton-router``: reads the settings, starts the router, says what went wrong."""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from protocol.config import RouterSettings
from protocol.errors import BatonError, ConfigError
from protocol.flags import EXIT_WRONG_SETTING, settings_app
from protocol.worker_process import start_logging
from router.server import Router

NAME = "baton-router"
EXIT_OK = 0
EXIT_FAILED = 1

ABOUT = """Serve the OpenAI API and spread requests over the prefill and decode workers that dial in.

Exit codes: 0 left in good order; 2 a wrong setting, model directory or busy port; 1 anything else."""


def start(settings: RouterSettings) -> int:
    start_logging(settings.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except (BatonError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTING if isinstance(error, ConfigError) else EXIT_FAILED
    return EXIT_OK


async def _run(settings: RouterSettings) -> None:
    router = Router(settings)
    gc.freeze()  # what is here now stays; the collector needn't look at it for every burst of tokens
    await router.run()


app = settings_app(NAME, ABOUT, RouterSettings, "router", start)


def main() -> None:
    app(prog_name=NAME)


if __name__ == "__main__":
    main()
