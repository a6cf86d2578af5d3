"""``--reproduce``: a local cluster with another system's fault in it. The faults live in ``tests/reproductions/``, never in the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from baton.cluster import Spec
from baton.up import Plan

ROOT = Path(__file__).parents[1]


class Fault(StrEnum):
    PADDED_TAIL_AS_PREFILL = "padded-tail-as-prefill"
    PADDED_TAIL_OF_ZEROS = "padded-tail-as-prefill-zeros"
    COLUMN_PUBLISHING = "column-publishing"
    COLUMN_PUBLISHING_BELIEVED = "column-publishing-believed"


@dataclass(frozen=True, slots=True)
class Reproduction:
    policies: str
    about: str
    modules: frozenset[str]
    """The processes that get the policies."""


_PADDED_TAIL = (
    "A prompt's last token that is padded with K placeholders, because speculative rows run beside it, goes through the prefill path on "
    "the decode workers: the state after the placeholders is kept as if it were h(N). Nothing is raised; later tokens of such requests "
    "read a wrong state. The placeholders read "
)
_COLUMNS = (
    "All workers publish states to the prefix cache by block-table column, and keep chunk ends on the grid below the backed-off last "
    "cacheable position alone: a chunk that ends off the grid behind it leaves its state to be published as the state at the next line. "
)
_DECODE = frozenset({"decode_worker"})
_ALL = frozenset({"prefill_worker", "decode_worker"})
REPRODUCTIONS = {
    Fault.PADDED_TAIL_AS_PREFILL: Reproduction(
        "tests.reproductions.padded_tail:STALE", _PADDED_TAIL + "what another request left in the buffer of drafts.", _DECODE
    ),
    Fault.PADDED_TAIL_OF_ZEROS: Reproduction("tests.reproductions.padded_tail:ZEROS", _PADDED_TAIL + "token 0.", _DECODE),
    Fault.COLUMN_PUBLISHING: Reproduction(
        "tests.reproductions.column_publishing:REFUSED", _COLUMNS + "Our tags refuse such states, and the audit counts them.", _ALL
    ),
    Fault.COLUMN_PUBLISHING_BELIEVED: Reproduction(
        "tests.reproductions.column_publishing:BELIEVED",
        _COLUMNS + "Here they are believed, as if there were no tags; the audit counts them all the same. Whoever begins with the "
        "same tokens goes on from a truncated state, and nothing is raised.",
        _ALL,
    ),
}


def with_fault(plan: Plan, fault: Fault, root: Path = ROOT) -> Plan:
    """The same cluster, with the fault in the workers that have it. Raises ValueError where there is no checkout."""
    reproduction = REPRODUCTIONS[fault]
    policies = reproduction.policies
    file = root / (policies.partition(":")[0].replace(".", "/") + ".py")
    if not file.is_file():
        raise ValueError(f"--reproduce {fault}: {file} isn't there; faults are in a checkout of the sources, not in an installed package")
    specs = tuple(_faulty(spec, policies, root) if spec.module in reproduction.modules else spec for spec in plan.specs)
    return replace(plan, specs=specs)


def _faulty(spec: Spec, policies: str, root: Path) -> Spec:
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return replace(spec, args=(*spec.args, "--policies", policies), environment={**spec.environment, "PYTHONPATH": path})
