"""What the audit and the second tier cost the engine's thread: tags and their checks on a decode step, a sampled hit that is computed
again beside it, and a prefix on its way to files and back.

    python -m scripts.measure_audit [CHECKPOINT] [--batches 1 8] [--steps 60]

CPU time of the engine's thread, so that other work on the machine doesn't count. Tags can't be switched off, so their cost is taken
as all of a request's state transaction in a step (begin, tag, check, commit): an upper bound. Both are measured in one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.models import resolve_model
from engine.audit import AuditLog
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.deep_audit import BUSY_STEPS, BUSY_TOKENS, DeepAudit
from engine.file_tier import open_file_tier
from engine.prefix_cache.nodes import Salt
from engine.prefix_cache.tier import TierEntry
from engine.request import EngineRequest
from engine.transaction import StateTransaction
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams

PROMPT_TOKENS, AUDIT_TOKENS = 64, 1024
REPEATS = 400
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--speculation", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(model=resolve_model(options.model), speculation=options.speculation, threads=1, max_running=max(options.batches))
    core = EngineCore(config)
    table = Table("batch", "decode step", "tags and checks", "share", title="state audit on a decode step, CPU time")
    for batch in options.batches:
        step, tags = decode_step(core, batch, options.steps), batch * transaction(core)
        table.add_row(str(batch), f"{step * 1e3:.3f} ms", f"{tags * 1e6:.1f} us", f"{tags / step:.2%}")
    console = Console()
    console.print(table)
    piece, token = audited_piece(core)
    beside = f"{BUSY_TOKENS} tokens ({piece * 1e3:.2f} ms) every {BUSY_STEPS} steps"
    console.print(f"a hit computed again: {token * 1e6:.0f} us per token; beside requests {beside}")
    spill, load = second_tier(core)
    moved = f"{spill * 1e3:.1f} ms to spill, {load * 1e3:.1f} ms to load"
    console.print(f"a prefix of {AUDIT_TOKENS} tokens: {moved}; to compute it: {AUDIT_TOKENS * token * 1e3:.0f} ms")


def decode_step(core: EngineCore, batch: int, steps: int) -> float:
    """Median seconds of a step in which ``batch`` requests decode and nobody prefills."""
    draw = random.Random(batch)
    keys = [RequestKey(RequestId(f"{batch}-{number}"), 0) for number in range(batch)]
    for key in keys:
        tokens = tuple(draw.randrange(8, core.model_info.vocab_size) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=4 * (steps + WARM_UP) + 64, ignore_eos=True)
        core.submit(EngineRequest(key=key, token_ids=tokens, sampling=sampling, use_cache=False))
    while core.load().waiting_tokens:
        core.step()
    times = [timed(core.step) for _ in range(WARM_UP + steps)][WARM_UP:]
    assert core.load().running == batch, "all decode to the end"
    for key in keys:
        core.cancel(key)
    return statistics.median(times)


def transaction(core: EngineCore) -> float:
    """Median seconds of one request's part in a step: a window is begun, its states are tagged, checked and committed."""
    pool, width = core.pools.slots, core.config.speculation + 1
    running, *scratch = pool.take(1 + width)
    pool.tags[running] = PROMPT_TOKENS
    state, position = StateTransaction(pool, running, scratch), PROMPT_TOKENS

    def hundred() -> None:
        nonlocal position
        for _ in range(100):
            state.begin_window(position, width)
            state.written()
            position = state.commit(width)

    times = [timed(hundred) / 100 for _ in range(REPEATS)]
    pool.give(state.slots)
    return statistics.median(times)


def audited_piece(core: EngineCore) -> tuple[float, float]:
    """Median seconds of a piece beside requests, and per token of pieces while nobody waits."""
    core.flush_cache()
    audit = DeepAudit(core.loaded.model, core.pools, AuditLog(), sample=1.0, max_tokens=AUDIT_TOKENS + 64)
    core.observe(audit)
    draw = random.Random(7)
    tokens = [draw.randrange(8, core.model_info.vocab_size) for _ in range(AUDIT_TOKENS)]
    for number in range(2):
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        core.submit(EngineRequest(key=RequestKey(RequestId(f"audited-{number}"), 0), token_ids=(*tokens, 8 + number), sampling=sampling))
        while core.has_work():
            core.step()
    assert audit.has_work(), "the second prompt has hit"
    busy = [timed(lambda: audit.work(busy=True)) for _ in range(5 * BUSY_STEPS)]
    pieces = sorted(busy)[-5:]
    done, start = audit.counters()["baton_deep_audit_tokens_total"], time.thread_time()
    while audit.has_work():
        audit.work(busy=False)
    seconds = time.thread_time() - start
    return statistics.median(pieces), seconds / (audit.counters()["baton_deep_audit_tokens_total"] - done)


def second_tier(core: EngineCore) -> tuple[float, float]:
    """Seconds that the engine's thread needs to give a prefix away, and to read it from files that the system still holds in memory."""
    tokens = tuple(random.Random(9).randrange(8, core.model_info.vocab_size) for _ in range(AUDIT_TOKENS))
    blocks = core.pools.blocks.take(core.pools.blocks.blocks_for(AUDIT_TOKENS))
    (slot,) = core.pools.slots.take(1)
    salt = Salt(weights_digest="", adapter=None, dtype="", cache_salt=None)
    entry = TierEntry(salt=salt, tokens=tokens, position=AUDIT_TOKENS, blocks=tuple(blocks), slot=slot)
    with tempfile.TemporaryDirectory() as folder:
        tier = open_file_tier(Path(folder), 1 << 30, core.model_info, core.pools)
        spill = timed(lambda: tier.spill(entry))
        tier.close()
        tier = open_file_tier(Path(folder), 1 << 30, core.model_info, core.pools)
        found = tier.find(salt, tokens, 0, AUDIT_TOKENS)
        assert found is not None, "it was written"
        load = timed(lambda: found.load(0, blocks, slot))
        tier.close()
    core.pools.blocks.give(blocks)
    core.pools.slots.give([slot])
    return spill, load


def timed(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
