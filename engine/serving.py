"""What both worker kinds say about their engine: built from settings, told to the router and to the log."""

from __future__ import annotations

import logging

from engine.audit import Violation
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.policies import load_policies
from protocol.config import WorkerSettings
from protocol.errors import ConfigError
from protocol.ids import Epoch, RequestId
from protocol.messages import MAX_DETAIL, MAX_STORY, AuditFound, CacheFlushed, Capacity, Fingerprint, FlushCache, Hello, Role
from protocol.worker_process import default_worker_id

log = logging.getLogger("baton.engine")


def load_core(settings: WorkerSettings) -> EngineCore:
    """Takes as long as the weights do. Raises CheckpointError, and ConfigError that names the setting."""
    try:
        core = EngineCore(EngineConfig(**settings.engine_values()), policies=load_policies(settings.policies))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _log_core(settings, core)
    return core


def make_hello(
    settings: WorkerSettings,
    core: EngineCore,
    *,
    epoch: Epoch,
    role: Role,
    fingerprint: Fingerprint,
    transport: str,
    peer_address: str | None = None,
) -> Hello:
    """``transport``: its name and version, for people."""
    return Hello(
        epoch=epoch,
        worker_id=settings.worker_id or default_worker_id(role),
        role=role,
        fingerprint=fingerprint,
        capacity=Capacity(
            max_model_len=core.capacity.max_model_len,
            kv_blocks=core.capacity.num_blocks,
            state_slots=core.capacity.num_slots,
            max_running=core.config.max_running,
            speculation=core.config.speculation,
            prefix_cache=core.config.prefix_cache,
        ),
        peer_address=peer_address,
        info={
            "kernels": f"{core.kernels.name}: {core.kernels.reason}",
            "transport": transport,
            "prefix_cache": _cache_told(core),
            "vocab_size": str(core.model_info.vocab_size),
        }
        | ({"policies": settings.policies} if settings.policies is not None else {}),
    )


def flush_cache(core: EngineCore, order: FlushCache, epoch: Epoch) -> CacheFlushed:
    """On the engine's thread. What came free is counted after the fact; what the cache kept beyond that is still used."""
    blocks, slots = core.pools.blocks, core.pools.slots
    free_blocks, free_slots = blocks.num_free, slots.num_free
    kept_blocks, kept_slots = blocks.num_kept, slots.num_kept
    core.flush_cache()
    freed_blocks, freed_slots = blocks.num_free - free_blocks, slots.num_free - free_slots
    told = CacheFlushed(
        epoch=epoch,
        number=order.number,
        freed_blocks=freed_blocks,
        freed_snapshots=freed_slots,
        kept_blocks=kept_blocks - freed_blocks,
        kept_snapshots=kept_slots - freed_slots,
    )
    log.info(
        "prefix cache flushed: %d blocks and %d states are free, %d and %d are still used",
        told.freed_blocks,
        told.freed_snapshots,
        told.kept_blocks,
        told.kept_snapshots,
    )
    return told


def audit_found(violation: Violation, epoch: Epoch) -> AuditFound:
    return AuditFound(
        epoch=epoch,
        purpose=violation.purpose,
        request_id=RequestId(violation.request_id),
        step=violation.step,
        claimed=violation.claimed,
        held=violation.held,
        detail=violation.detail[:MAX_DETAIL],
        story=violation.story[-MAX_STORY:],
    )


def _cache_told(core: EngineCore) -> str:
    config = core.config
    if not config.prefix_cache:
        return "off"
    backed_off = f", backed off by {config.backoff_tokens}" if config.backoff_tokens else ""
    spilled = f", evicted to {config.snapshot_dir}" if config.snapshot_dir is not None else ""
    audited = f", {config.audit_sample:.2%} of hits computed again" if config.audit_sample > 0 else ""
    return f"on: grid of {config.snapshot_tokens} tokens, {config.chunk_policy} chunks{backed_off}{spilled}{audited}"


def _log_core(settings: WorkerSettings, core: EngineCore) -> None:
    if settings.policies is not None:
        log.warning("POLICIES FROM %s INSTEAD OF OURS: this process re-creates a fault; its answers can't be trusted", settings.policies)
    info, (blocks, slots) = core.model_info, core.regions
    log.info("%s: %s, weights %s, MTP %s", settings.model, info.model_type, info.weights_digest[:12], "yes" if info.has_mtp else "no")
    log.info("kernels: %s, because: %s", core.kernels.name, core.kernels.reason)
    log.info("prefix cache: %s", _cache_told(core))
    log.info(
        "pools: %d blocks of %d bytes (%d tokens each), %d slots of %d bytes; at most %d tokens and %d requests, %d states in the cache",
        blocks.num_pages,
        blocks.page_bytes,
        core.config.block_tokens,
        slots.num_pages,
        slots.page_bytes,
        core.capacity.max_model_len,
        core.config.max_running,
        core.capacity.snapshot_slots if core.cache is not None else 0,
    )
