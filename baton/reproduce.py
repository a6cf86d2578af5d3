"""``--reproduce``: a local cluster with another system's fault in it. The faults live in ``tests/reproductions/``, never in the engine."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from baton.cluster import Spec
from baton.up import Plan

ROOT = Path(__file__).parents[1]


class Fault(StrEnum):
    PADDED_TAIL_AS_PREFILL = "padded-tail-as-prefill"
    PADDED_TAIL_OF_ZEROS = "padded-tail-as-prefill-zeros"


_PADDED_TAIL = (
    "A prompt's last token that is padded with K placeholders, because speculative rows run beside it, goes through the prefill path on "
    "the decode workers: the state after the placeholders is kept as if it were h(N). Nothing is raised; later tokens of such requests "
    "read a wrong state. The placeholders read "
)
ABOUT = {
    Fault.PADDED_TAIL_AS_PREFILL: _PADDED_TAIL + "what another request left in the buffer of drafts.",
    Fault.PADDED_TAIL_OF_ZEROS: _PADDED_TAIL + "token 0.",
}
POLICIES = {
    Fault.PADDED_TAIL_AS_PREFILL: "tests.reproductions.padded_tail:STALE",
    Fault.PADDED_TAIL_OF_ZEROS: "tests.reproductions.padded_tail:ZEROS",
}


def with_fault(plan: Plan, fault: Fault, root: Path = ROOT) -> Plan:
    """The same cluster, its decode workers with the fault. Raises ValueError where there is no checkout."""
    policies = POLICIES[fault]
    file = root / (policies.partition(":")[0].replace(".", "/") + ".py")
    if not file.is_file():
        raise ValueError(f"--reproduce {fault}: {file} isn't there; faults are in a checkout of the sources, not in an installed package")
    return replace(plan, specs=tuple(_faulty(spec, policies, root) if spec.module == "decode_worker" else spec for spec in plan.specs))


def _faulty(spec: Spec, policies: str, root: Path) -> Spec:
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return replace(spec, args=(*spec.args, "--policies", policies), environment={**spec.environment, "PYTHONPATH": path})
