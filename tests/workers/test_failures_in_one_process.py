"""What goes wrong between the workers: one ending each, the right reason, and every page back. Over the loopback transport."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from protocol.errors import Unwelcomed
from protocol.ids import Epoch, RequestId, RequestKey
from protocol.messages import Cancelled, Failed, Finished, HelloAgain, Prefill, PrefillDone, Refused, Unwelcome
from tests.engine.engine_kit import prompt
from tests.workers.together import PATIENCE_S, Story, Together, together, until
from transfer.loopback import Faults

LONG = 40


def was_cancelled(story: Story) -> bool:
    """P may have been told first, and have told D."""
    ending = story.decode_ending
    return isinstance(ending, Cancelled) or (isinstance(ending, Failed) and ending.message == "the request was cancelled")


async def still_works(cluster: Together) -> None:
    story = await cluster.router.ask("afterwards", prompt(LONG), max_tokens=4)
    assert isinstance(await story.end(), Finished)
    await cluster.whole()


async def test_cancels_at_random_stages_leave_both_pools_whole(checkpoint: Path) -> None:
    draw = random.Random(3)
    async with together(checkpoint, faults=Faults(delay_s=0.01), speculation=2) as cluster:

        async def one(name: str) -> Story:
            await asyncio.sleep(draw.random() * 0.5)
            story = await cluster.router.ask(name, prompt(draw.randrange(2, LONG)), max_tokens=60)
            await asyncio.sleep(draw.random() ** 2 * 0.3)
            await cluster.router.cancel(story)
            await story.end()
            return story

        stories = await asyncio.gather(*(one(f"r{i}") for i in range(60)))
        for story in stories:
            if isinstance(story.decode_ending, Failed):
                assert was_cancelled(story)
        assert any(isinstance(story.decode_ending, Cancelled) for story in stories)
        await still_works(cluster)


@pytest.mark.parametrize(
    ("faults", "reason", "lease_s"),
    [
        (Faults(corrupt=1.0), "checksum", 600.0),
        (Faults(truncate=1.0), "checksum", 600.0),
        (Faults(fail_send=1.0), "injected send error", 600.0),
        (Faults(drop=1.0), "not fetched within 0.5 s", 0.5),
    ],
)
async def test_a_hand_off_that_goes_wrong_is_never_decoded(checkpoint: Path, faults: Faults, reason: str, lease_s: float) -> None:
    async with together(checkpoint, faults=faults, lease_s=lease_s) as cluster:
        story = await cluster.router.ask("r", prompt(LONG), max_tokens=4)
        ending = await story.end()
        assert isinstance(ending, Failed)
        assert ending.code in ("transfer_failed", "lease_ended")
        assert reason in ending.message
        assert story.tokens == []
        await cluster.whole()
        local = await cluster.router.admit("local", prompt(9), remote=False, max_tokens=4)
        assert isinstance(await local.end(), Finished)


async def test_a_prefill_worker_that_dies_mid_transfer_fails_the_request_at_once(checkpoint: Path) -> None:
    """Long before its lease ends."""
    async with together(checkpoint, faults=Faults(die_after=2)) as cluster:
        story = await cluster.router.ask("r", prompt(LONG), max_tokens=4)
        ending = await story.end()
        assert isinstance(ending, Failed)
        assert ending.code == "prefill_lost"
        await until(lambda: not cluster.decode.requests.num_open)
        load = await cluster.decode.bridge.call(lambda core: core.load())
        assert load.held_for_peers == 0
        assert load.free_blocks == cluster.decode.core.capacity.num_blocks - 1


async def test_a_decode_worker_that_dies_gives_the_prefill_workers_pages_back(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        story = await cluster.router.admit("r", prompt(LONG))
        await cluster.router.until(story.admitted.is_set)
        cluster.d_transport.die()
        await cluster.router.prefill(story, prompt(LONG))
        await cluster.router.prefill_end(story)
        await until(lambda: not cluster.prefill.requests.num_open)
        load = await cluster.prefill.bridge.call(lambda core: core.load())
        assert (load.running, load.held_for_peers) == (0, 0)


async def test_another_model_is_refused_by_name_before_any_request(checkpoint: Path, other_checkpoint: Path) -> None:
    async with together(checkpoint, other_model=other_checkpoint) as cluster:
        (paired,) = cluster.router.paired.values()
        assert not paired.ok
        assert paired.field == "weights_digest"
        story = await cluster.router.ask("r", prompt(5))
        ending = await story.end()
        assert isinstance(ending, Refused)
        assert "not paired" in ending.message


async def test_a_restarted_router_finds_idle_workers(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        running = await cluster.router.ask("r", prompt(LONG), max_tokens=80)
        waiting = await cluster.router.admit("w", prompt(LONG))
        await cluster.router.until(lambda: bool(running.tokens) and waiting.admitted.is_set())
        for epoch in cluster.router.hellos:
            await cluster.router.tell(epoch, HelloAgain(epoch=Epoch("the next router")))
        for story in (running, waiting):
            await story.end()
            assert was_cancelled(story)
        await still_works(cluster)


async def test_a_lease_that_ends_fails_the_latecomer(checkpoint: Path) -> None:
    """The hand-off is sealed for a decode worker that never asks."""
    async with together(checkpoint) as cluster:
        router = cluster.router
        key = RequestKey(RequestId("r"), 0)
        story = router.stories[key] = Story(key)
        order = Prefill(
            epoch=router.epoch, request_id=RequestId("r"), generation=0, token_ids=prompt(9), decode_epoch=router.epochs("decode")[0]
        )
        await router.tell(router.epochs("prefill")[0], order)
        assert isinstance(await router.prefill_end(story), PrefillDone)
        leases = cluster.prefill.requests._leases
        await until(leases.next_deadline)
        cluster.prefill.requests.tick(leases.next_deadline() or 0.0)
        await cluster.whole()
        late = await router.admit("r", (*prompt(9), 3))
        ending = await late.end()
        assert isinstance(ending, Failed)
        assert "not fetched within" in ending.message
        await still_works(cluster)


async def test_what_the_prefill_worker_refuses_the_decode_worker_hears(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        story = await cluster.router.admit("r", prompt(5))
        await cluster.router.until(story.admitted.is_set)
        await cluster.router.prefill(story, (99999, *prompt(4)))
        ending = await story.end()
        assert isinstance(ending, Failed)
        assert ending.code == "bad_request"
        refused = await cluster.router.prefill_end(story)
        assert isinstance(refused, Refused)
        assert "outside the vocabulary" in refused.message
        await still_works(cluster)


async def test_impossible_requests_are_refused_with_the_numbers(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        ending = await (await cluster.router.ask("r", prompt(100), max_tokens=1000)).end()
        assert isinstance(ending, Refused)
        assert ending.code == "bad_request"
        assert "128" in ending.message
        await still_works(cluster)


async def test_no_room_is_busy_and_changes_nothing(checkpoint: Path) -> None:
    async with together(checkpoint, kv_blocks=17) as cluster:
        first = await cluster.router.ask("first", prompt(LONG), max_tokens=8)
        second = await cluster.router.admit("second", prompt(LONG))
        ending = await second.end()
        assert isinstance(ending, Refused)
        assert ending.code == "busy"
        assert isinstance(await first.end(), Finished)
        await still_works(cluster)


async def test_draining_workers_finish_what_they_have_and_say_goodbye(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        router = cluster.router
        story = await router.ask("r", prompt(LONG), max_tokens=30)
        await router.prefill_end(story)
        cluster.prefill.departure.ask()
        cluster.decode.departure.ask()
        await asyncio.sleep(0)
        refused = await router.admit("late", prompt(4))
        ending = await refused.end()
        assert isinstance(ending, Refused)
        assert ending.code == "draining"
        assert isinstance(await story.end(), Finished)
        assert len(story.tokens) == 30
        await router.until(lambda: router.gone == set(router.hellos))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(cluster.p_task, cluster.d_task)


async def test_a_drain_that_takes_too_long_cancels(checkpoint: Path) -> None:
    async with together(checkpoint, drain_timeout_s=0.2) as cluster:
        story = await cluster.router.admit("never prefilled", prompt(LONG))
        await cluster.router.until(story.admitted.is_set)
        cluster.decode.departure.ask()
        assert isinstance(await story.end(), Cancelled)
        async with asyncio.timeout(PATIENCE_S):
            await cluster.d_task


async def test_an_unwelcome_worker_ends_with_the_field(checkpoint: Path) -> None:
    async with together(checkpoint) as cluster:
        epoch = cluster.decode.epoch
        await cluster.router.tell(epoch, Unwelcome(epoch=cluster.router.epoch, field="weights_digest", message="another model"))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ExceptionGroup) as raised:
                await cluster.d_task
        assert raised.group_contains(Unwelcomed, match="weights_digest")
        cluster.may_fail = True
