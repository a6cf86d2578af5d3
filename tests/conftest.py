"""What holds for every test: nothing of the machine that it runs on may decide it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("baton", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")  # the same examples everywhere, however long they take

for name in ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "COLUMNS"):  # rich and typer would colour what tests read
    os.environ.pop(name, None)
os.environ["NO_PROXY"] = "*"  # every server here is on this machine
