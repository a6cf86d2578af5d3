"""Random schedules through engines of every odd size, without a model: no lie, no leak, no endless wait, no request left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.request import EngineRequest, FailedEvent, FinishedEvent, Origin, SealedEvent
from protocol.ids import RequestId, RequestKey
from protocol.sampling import SamplingParams
from tests.reproductions.grid_schedules import Oracle
from tests.reproductions.model_free import VOCAB, ModelFreeCore

SCHEDULES = 60
MAX_STEPS = 50_000


def any_core(draw: random.Random) -> ModelFreeCore:
    """Pools between too small for two requests and roomy, grids beside blocks, budgets that fund next to nothing."""
    block_tokens, speculation = draw.choice((1, 2, 4, 16)), draw.choice((0, 0, 1, 3, 7))
    chunk, step = draw.randint(1, 80), max(speculation + 1, draw.randint(1, 120))
    budget = draw.choice((None, draw.randint(1, 60)))
    grid, policy = draw.choice((block_tokens, 2 * block_tokens, 3, 5, 16, 64)), draw.choice(("soft", "strict"))
    blocks = draw.randint(8, 60)
    settings: dict[str, Any] = {
        "block_tokens": block_tokens, "speculation": speculation, "max_prefill_chunk": chunk, "step_tokens": step,
        "prefill_token_budget": budget, "chunk_policy": policy,
        "snapshot_tokens": grid if policy == "soft" else min(grid, chunk, step, budget or step),
        "kv_blocks": blocks + 1, "max_model_len": blocks * block_tokens, "snapshot_slots": draw.choice((0, 1, 3, 8, 40)),
        "state_slots": speculation + 3 + draw.randint(0, 4 * speculation + 12), "max_running": draw.choice((1, 2, 4, 16)),
        "tail_padding": draw.choice(("auto", "always", "never")),
    }  # fmt: skip
    return ModelFreeCore(**settings)


class Schedule:
    """Requests with common beginnings that come, land, are fetched, cancelled and flushed at random."""

    def __init__(self, draw: random.Random, *, prefills: bool) -> None:
        """``prefills``: for peers, as on a prefill worker; else local and remote ones, as on a decode worker."""
        self._draw, self._prefills = draw, prefills
        self.core = any_core(draw)
        self.oracle = Oracle(self.core)
        self.core.observe(self.oracle)
        self._room = self.core.capacity.max_model_len
        self._beginnings = [self._tokens(self._room) for _ in range(3)]
        self.running: set[RequestKey] = set()
        self.landing: dict[RequestKey, tuple[int, int]] = {}
        """Slot and position."""
        self.sealed: set[RequestKey] = set()
        self._count = 0

    def run(self) -> None:
        does = [self._come] * 7 + [self._fetch, self._cancel] * 2 + [self._step] * 7 + [self._flush]
        for _ in range(self._draw.randint(10, 100)):
            self._draw.choice(does)()
            self.core.check_integrity()
        self._wind_up()

    def _wind_up(self) -> None:
        """Everybody who is left gets to the end."""
        for key in list(self.landing):
            self._forget(key)
        for _ in range(MAX_STEPS):
            if self.core.has_work():
                self._step_once()
            elif self.sealed:
                self.core.release(self.sealed.pop())
            else:
                break
        assert not self.running, f"left behind: {self.core.load()}"
        assert not self.oracle.lies, self.oracle.lies[:3]
        assert self.core.audit.total == 0
        self.core.flush_cache()
        self.core.check_integrity()
        assert self.core.pools.blocks.num_free == self.core.capacity.num_blocks - 1

    def _come(self) -> None:
        tokens = self._prompt()
        if self._prefills:
            self._submit(tokens, "seal")
        elif len(tokens) > 1 and self._draw.random() < 0.4:
            self._reserve(tokens)
        else:
            self._submit(tokens, "local")

    def _submit(self, tokens: tuple[int, ...], origin: Origin) -> None:
        request = self._request(tokens, origin)
        self.core.submit(request)
        self.running.add(request.key)

    def _reserve(self, tokens: tuple[int, ...]) -> None:
        request = self._request(tokens, "remote")
        landing = self.core.reserve(request)
        if landing is not None:
            self.running.add(request.key)
            if not landing.complete:
                self.landing[request.key] = landing.slot, landing.position

    def _fetch(self) -> None:
        if self.landing:
            key = self._draw.choice(sorted(self.landing))
            self.core.receive(*self.landing.pop(key))
            self.core.land(key)
        if self.sealed:
            key = self._draw.choice(sorted(self.sealed))
            self.sealed.remove(key)
            self.core.release(key)

    def _cancel(self) -> None:
        if self.running:
            self._forget(self._draw.choice(sorted(self.running)))

    def _forget(self, key: RequestKey) -> None:
        self.running.remove(key)
        self.landing.pop(key, None)
        self.core.cancel(key, keep=self._draw.random() < 0.5)

    def _flush(self) -> None:
        self.core.flush_cache()

    def _step(self) -> None:
        for _ in range(self._draw.randint(1, 6)):
            self._step_once()

    def _step_once(self) -> None:
        for event in self.core.step():
            assert not isinstance(event, FailedEvent), event
            if isinstance(event, (FinishedEvent, SealedEvent)):
                self.running.remove(event.key)
            if isinstance(event, SealedEvent):
                assert self.core.held(event.slot) == event.position
                self.sealed.add(event.key)

    def _request(self, tokens: tuple[int, ...], origin: Origin) -> EngineRequest:
        self._count += 1
        longest = max(1, min(30, self._room - len(tokens)))
        return EngineRequest(
            key=RequestKey(RequestId(str(self._count)), 0),
            token_ids=tokens,
            origin=origin,
            sampling=SamplingParams(max_tokens=self._draw.randint(1, longest), ignore_eos=True),
            cache_salt=self._draw.choice((None, None, None, "other")),
            use_cache=self._draw.random() < 0.9,
        )

    def _prompt(self) -> tuple[int, ...]:
        size, limit = self.core.config.block_tokens, self._room - 2
        length = self._draw.choice((self._draw.randint(1, limit), self._draw.randint(1, limit), 1, size, size + 1, limit // 2))
        tokens = self._draw.choice(self._beginnings)[: max(1, min(length, limit))]
        return (*tokens[:-1], self._draw.randrange(VOCAB)) if self._draw.random() < 0.4 else tokens

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(VOCAB) for _ in range(length))


@pytest.mark.parametrize("prefills", [False, True])
def test_any_schedule_ends_whole_and_true(prefills: bool) -> None:
    drafts = 0.0
    for seed in range(SCHEDULES):
        schedule = Schedule(random.Random(f"{seed} {prefills}"), prefills=prefills)
        schedule.run()
        drafts += schedule.core.counters()["baton_accepted_drafts_total"]
    assert (drafts > 0) != prefills, "windows commit several tokens"
