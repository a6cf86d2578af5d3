"""How a decode worker's engine takes a request: what its cache lacks of the prompt decides who computes that."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from engine.core import EngineCore
from engine.request import EngineRequest, Landing


def take(core: EngineCore, request: EngineRequest, *, local_tokens: int, max_waiting: int) -> Landing | Literal["queued", "full"]:
    """On the engine's thread. A ``remote`` request gets pages to land in, unless the cache lacks so little of its prompt that this engine
    computes it sooner than P could hand it over: then it is queued, like a ``local`` one.

    full: no room, nothing was changed. Raises ValueError for a request that can never run here.
    """
    if request.origin == "remote" and not _is_short(core, request, local_tokens):
        return core.reserve(request) or "full"
    if core.load().waiting >= max_waiting:
        return "full"
    core.submit(replace(request, origin="local"))
    return "queued"


def _is_short(core: EngineCore, request: EngineRequest, local_tokens: int) -> bool:
    """The rest of a cached prompt. A prompt of which nothing is cached goes to P, however short: the router has decided that."""
    if not request.use_cache or local_tokens == 0:
        return False
    cached = core.cached(request.token_ids, request.cache_salt).state_tokens
    return 0 < cached < len(request.token_ids) - 1 <= cached + local_tokens
