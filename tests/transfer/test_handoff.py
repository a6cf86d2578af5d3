"""Whole hand-offs over the loopback transport: the good ones arrive, the bad ones end once and touch nothing afterwards."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import Fetch, HandoffFailed, Manifest, Pull, Ready, Release
from tests.transfer.rig import D_EPOCH, Rig
from transfer import receive, send
from transfer.loopback import Faults


@pytest.mark.parametrize("position", [1, 3, 4, 5, 16, 61])
@pytest.mark.parametrize("checksums", [True, False])
async def test_everything_arrives(position: int, checksums: bool) -> None:
    rig = Rig(position, checksums=checksums, seed=position)
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert rig.d.commits == 1
    assert rig.arrived()
    rig.check_over()
    assert rig.d.ended[0].ok
    assert rig.p.ended[0].ok


async def test_ready_blocks_travel_while_the_rest_is_computed() -> None:
    rig = Rig(40, seed=3)
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.ready(0, 4)
    rig.ready(4, 7)
    await rig.settle()
    early = [bytes(rig.d_layout.page("blocks", block)) for block in rig.d_blocks[:7]]
    assert early == rig.expected[:7]
    assert rig.d.commits == 0
    rig.ready(7, 9)
    rig.seal()
    await rig.settle()
    assert rig.d.commits == 1
    rig.check_over()
    pulled = sum(copy.num_bytes for message in rig.d.said if isinstance(message, Pull) for copy in message.copies)
    assert pulled == 10 * 48 + 112, "each byte is pulled once"


async def test_a_fetch_before_the_prefill_is_kept() -> None:
    rig = Rig(9)
    rig.receiver.feed(receive.Begin())
    await rig.settle()
    assert rig.p.computes == 0
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    rig.ready(0, 2)
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert rig.d.commits == 1


async def test_a_fetch_after_the_seal_gets_the_manifest() -> None:
    rig = Rig(9)
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    rig.ready(0, 2)
    rig.seal()
    rig.receiver.feed(receive.Begin())
    await rig.settle()
    assert [type(message) for message in rig.p.said] == [Manifest]
    assert rig.d.commits == 1
    rig.check_over()


async def test_blocks_that_d_has_stay_where_they_are() -> None:
    rig = Rig(40, have_blocks=6)
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.ready(0, 8)
    rig.seal()
    await rig.settle()
    assert rig.d.commits == 1
    assert rig.receiver.machine.num_bytes == 4 * 48 + 112


async def test_a_long_hand_off_is_pulled_in_parts() -> None:
    rig = Rig(200, seed=1)
    with mock.patch.multiple(receive, FIRST_PULL_BYTES=100, PULL_BYTES=500):
        rig.sender.feed(send.PrefillAsked(D_EPOCH))
        rig.receiver.feed(receive.Begin())
        await rig.settle()
        rig.seal()
        await rig.settle()
    sizes = [sum(copy.num_bytes for copy in message.copies) for message in rig.d.said if isinstance(message, Pull)]
    assert 100 <= sizes[0] < 500 <= sizes[1]
    assert sum(sizes) == 50 * 48 + 112
    assert rig.d.commits == 1
    rig.check_over()


@pytest.mark.parametrize("fault", [Faults(corrupt=1.0), Faults(truncate=1.0)])
async def test_wrong_bytes_are_found(fault: Faults) -> None:
    rig = Rig(17, faults=fault)
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert [fail.code for fail in rig.d.failed] == ["transfer_failed"]
    assert "checksum" in rig.d.failed[0].message
    assert rig.d.said[-1] == rig.d.said[-1].model_copy(update={"ok": False})
    rig.check_over()


async def test_a_dead_sender_is_known_at_once_and_nothing_is_left() -> None:
    rig = Rig(60, faults=Faults(die_after=5))
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert [fail.code for fail in rig.d.failed] == ["prefill_lost"]
    assert len(rig.d.ended) == 1
    assert not rig.d.ended[0].ok
    assert rig.d_transport.open_receives == 0


async def test_pages_stay_pinned_until_the_last_send_has_ended() -> None:
    rig = Rig(30, faults=Faults(delay_s=0.02))
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert rig.sender.machine.in_flight
    rig.sender.feed(send.LeaseOver())
    assert rig.p.ended == []
    await rig.settle(0.04)
    assert not rig.sender.machine.in_flight
    rig.check_over()
    assert [fail.code for fail in rig.d.failed] == ["lease_ended"]


async def test_a_fetch_after_the_lease_is_refused_and_told_why() -> None:
    """P's pages have another owner by then (the rig scribbles over them)."""
    rig = Rig(12)
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    rig.seal()
    rig.sender.feed(send.LeaseOver())
    rig.receiver.feed(receive.Begin())
    await rig.settle()
    assert [fail.code for fail in rig.d.failed] == ["lease_ended"]
    rig.check_over()


async def test_late_messages_of_a_cancelled_hand_off_find_no_pages() -> None:
    rig = Rig(30, faults=Faults(delay_s=0.02))
    rig.receiver.feed(receive.Begin())
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert rig.receiver.machine.in_flight
    rig.receiver.feed(receive.Cancelled())
    assert rig.d.ended == [], "cancelled, but the transfers aren't over"
    await rig.settle(0.04)
    rig.check_over()
    assert rig.d.failed == []
    assert rig.canary_is_alive()


async def test_both_ends_tell_their_story_in_the_right_order() -> None:
    rig = Rig(9)
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    rig.receiver.feed(receive.Begin())
    await rig.settle()
    rig.ready(0, 2)
    await rig.settle()
    rig.seal()
    await rig.settle()
    assert [type(message) for message in rig.d.said] == [Fetch, Pull, Pull, Release]
    assert [type(message) for message in rig.p.said] == [Ready, Manifest]


SHARE = st.sampled_from([0.0, 0.0, 0.05, 0.3])


@given(
    position=st.integers(1, 50),
    seed=st.integers(0, 10**6),
    have=st.integers(0, 12),
    faults=st.builds(
        Faults,
        delay_s=st.sampled_from([0.0, 0.001]),
        drop=SHARE,
        truncate=SHARE,
        corrupt=SHARE,
        duplicate=SHARE,
        fail_send=SHARE,
        die_after=st.sampled_from([None, None, None, 0, 3]),
    ),
    control_delay_s=st.sampled_from([0.0, 0.001]),
    script=st.lists(st.sampled_from(["ready", "fetch", "cancel d", "cancel p", "lease", "wait", "die p", "die d"]), max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_any_schedule_of_faults_ends_once_and_commits_only_the_truth(
    position: int, seed: int, have: int, faults: Faults, control_delay_s: float, script: list[str]
) -> None:
    with mock.patch.multiple(receive, FIRST_PULL_BYTES=100, PULL_BYTES=250):  # several pulls even for these few bytes
        asyncio.run(_run_schedule(position, seed, have, faults, control_delay_s, script))


async def _run_schedule(position: int, seed: int, have: int, faults: Faults, control_delay_s: float, script: list[str]) -> None:
    rig = Rig(position, seed=seed, have_blocks=min(have, -(-position // 4)), faults=faults)
    rig.control_delay_s = control_delay_s
    rig.sender.feed(send.PrefillAsked(D_EPOCH))
    ready, begun = 0, False
    for step in script:
        if step == "ready" and ready < len(rig.p_blocks):
            stop = rig.draw.randint(ready + 1, len(rig.p_blocks))
            rig.ready(ready, stop)
            ready = stop
        elif step == "fetch" and not begun:
            rig.receiver.feed(receive.Begin())
            begun = True
        elif step == "cancel d" and begun:
            rig.receiver.feed(receive.Cancelled())
        elif step == "cancel p":
            rig.sender.feed(send.GaveUp("internal", "told to"))
        elif step == "lease" and rig.sender.machine.state is send.SendState.SEALED:
            rig.sender.feed(send.LeaseOver())
        elif step in ("die p", "die d"):
            (rig.p_transport if step == "die p" else rig.d_transport).die()
        await rig.settle(0.001 if step == "wait" else 0.0)
    rig.seal()
    if not begun:
        rig.receiver.feed(receive.Begin())
    await rig.settle(2 * faults.delay_s + 6 * control_delay_s)
    committed = rig.d.commits == 1
    rig.receiver.feed(receive.Cancelled("the client has waited enough"))  # what was dropped never comes
    rig.sender.feed(send.PeerGone("ended by the test"))
    await rig.settle(2 * faults.delay_s + 2 * control_delay_s)
    assert rig.d.commits == committed
    assert len(rig.d.failed) <= (0 if committed else 1)
    rig.check_over()
    assert rig.arrived() if committed else rig.canary_is_alive()
    assert not any(isinstance(message, HandoffFailed) for message in rig.p.said[:-1]), "a failure is the last thing that P says"
