"""Caches of every small size under random traffic: whole after every event, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from engine.core import EngineCore
from engine.request import EngineRequest, FinishedEvent, Landing, SealedEvent
from protocol.ids import RequestKey
from tests.cache.cache_kit import expected, family, plain_pages
from tests.engine.engine_kit import Drive, MakeCore, Told, assert_whole, poison, prompt, request

OUTPUT = 6
PROMPTS = [*family(13, (1, 4, 12)), *family(8, (2, 9), seed=4), prompt(1), prompt(2), prompt(16), prompt(17), (*prompt(17), 3, 4, 5)]
PARAMS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}]
BLOCK_TOKENS = 4
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failing run is short enough to be read as it is; making it shorter takes minutes."""


class Truth:
    """What each prompt gives without a cache, and the pages of its first N-1 tokens."""

    def __init__(self, make_core: MakeCore) -> None:
        self.make_core = make_core
        requests = [request(i, each, max_tokens=OUTPUT, **params) for i, each in enumerate(PROMPTS) for params in PARAMS]
        self.tokens = expected(make_core, requests)
        self.pages = [plain_pages(make_core, each[:-1], block_tokens=BLOCK_TOKENS) if len(each) > 1 else None for each in PROMPTS]


class Traffic(RuleBasedStateMachine):
    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.number = 0
        self.which: dict[RequestKey, tuple[int, int]] = {}
        self.landing: dict[RequestKey, Landing] = {}
        self.cancelled: set[RequestKey] = set()
        self.prefills: dict[RequestKey, int] = {}

    @initialize(
        speculation=st.sampled_from([0, 0, 3]), blocks=st.integers(10, 40), snapshots=st.integers(0, 8), spare_slots=st.integers(0, 9),
        grid=st.sampled_from([1, 4, 6, 8]), policy=st.sampled_from(["soft", "strict"]), chunk=st.integers(8, 20),
        budget=st.integers(8, 40), padding=st.sampled_from(["auto", "always"]),
    )  # fmt: skip
    def begin(self, speculation: int, blocks: int, snapshots: int, spare_slots: int, chunk: int, budget: int, **rest: Any) -> None:
        self.core: EngineCore = self.truth.make_core(
            speculation=speculation, kv_blocks=blocks, snapshot_slots=snapshots, state_slots=speculation + 4 + spare_slots,
            max_prefill_chunk=chunk, step_tokens=budget, block_tokens=BLOCK_TOKENS, snapshot_tokens=rest["grid"],
            chunk_policy=rest["policy"], tail_padding=rest["padding"],
        )  # fmt: skip
        self.drive = Drive(self.core)
        poison(self.core)

    def _request(self, which: int, params: int, **changes: Any) -> EngineRequest:
        self.number += 1
        return replace(request(self.number, PROMPTS[which], max_tokens=OUTPUT, **PARAMS[params]), **changes)

    @rule(which=st.integers(0, len(PROMPTS) - 1), params=st.integers(0, 1), use_cache=st.sampled_from([True, True, True, False]))
    def submit(self, which: int, params: int, use_cache: bool) -> None:
        each = self._request(which, params, use_cache=use_cache)
        self.core.submit(each)
        self.which[each.key] = which, params

    @rule(which=st.integers(0, len(PROMPTS) - 1), params=st.integers(0, 1))
    def reserve(self, which: int, params: int) -> None:
        if len(PROMPTS[which]) < 2:
            return
        each = self._request(which, params, origin="remote")
        landing = self.core.reserve(each)
        if landing is not None:
            self.which[each.key] = which, params
            if not landing.complete:
                self.landing[each.key] = landing

    @precondition(lambda self: self.landing)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Only what isn't there travels."""
        where, landing = self.landing.popitem()
        pages = self.truth.pages[self.which[where][0]]
        assert pages is not None
        slot, blocks = pages
        self.core.pools.slots.tensor[landing.slot] = slot
        missing = landing.blocks[landing.have_blocks :]
        self.core.pools.blocks.tensor[list(missing)] = blocks[landing.have_blocks :]
        self.core.land(where)

    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def prefill_for_a_peer(self, which: int) -> None:
        each = self._request(which, 0, origin="seal")
        self.core.submit(each)
        self.prefills[each.key] = which

    @rule(data=st.data(), keep=st.booleans())
    def cancel(self, data: st.DataObject, keep: bool) -> None:
        if self.which:
            gone = data.draw(st.sampled_from(sorted(self.which)))
            self.landing.pop(gone, None)
            if self.core.cancel(gone, keep=keep):
                self.cancelled.add(gone)

    @rule()
    def flush(self) -> None:
        self.core.flush_cache()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            poison(self.core)
            self.drive.step()
            self._give_prefills_back()

    def _give_prefills_back(self) -> None:
        for where, which in list(self.prefills.items()):
            for sealed in self.drive.told.get(where, Told()).endings:
                assert isinstance(sealed, SealedEvent)
                assert self.core.pools.slots.tags[sealed.slot] == sealed.position == len(PROMPTS[which])
                self.core.release(where)
                del self.prefills[where]

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()
            assert not torch.isnan(self.core.pools.slots.tensor[[tag is not None for tag in self.core.pools.slots.tags]]).any()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for where in self.landing:
            self.cancelled.add(where)
            self.core.cancel(where)
        for _ in range(400):
            if not self.core.has_work():
                break
            self.steps(1)
        assert not self.core.has_work()
        for where, (which, params) in self.which.items():
            told, truth = self.drive.told.get(where, Told()), self.truth.tokens[which * len(PARAMS) + params]
            if where in self.cancelled:
                assert told.tokens == truth[: len(told.tokens)]
            else:
                assert told.tokens == truth
                assert [type(event) for event in told.endings] == [FinishedEvent]
        assert not self.prefills
        assert_whole(self.core)


def test_any_traffic_through_any_small_cache(make_core: MakeCore) -> None:
    truth = Truth(make_core)
    run_state_machine_as_test(
        lambda: Traffic(truth),  # type: ignore[arg-type]  # a factory is as good as the class
        settings=settings(max_examples=12, stateful_step_count=25, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck)),
    )
