"""``baton-decode``, ``python -m decode_worker``."""

from __future__ import annotations

from protocol.config import DecodeSettings
from protocol.flags import settings_app
from protocol.worker_process import run_process, start_logging

NAME = "baton-decode"


def start(settings: DecodeSettings) -> int:
    from decode_worker.worker import run  # torch and UCX take seconds to import: a wrong setting is told before

    start_logging(settings.log_level)
    return run_process(NAME, lambda: run(settings))


def main() -> None:
    settings_app(NAME, "Take hand-offs from prefill workers and decode.", DecodeSettings, "decode", start)()


if __name__ == "__main__":
    main()
