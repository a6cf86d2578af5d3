"""``baton-prefill``, ``python -m prefill_worker``."""

from __future__ import annotations

from protocol.config import PrefillSettings
from protocol.flags import settings_app
from protocol.worker_process import run_process, start_logging

NAME = "baton-prefill"


def start(settings: PrefillSettings) -> int:
    from prefill_worker.worker import run  # torch and UCX take seconds to import: a wrong setting is told before

    start_logging(settings.log_level)
    return run_process(NAME, lambda: run(settings))


def main() -> None:
    settings_app(NAME, "Compute prompts [0, N-1) and hand them over to decode workers.", PrefillSettings, "prefill", start)()


if __name__ == "__main__":
    main()
