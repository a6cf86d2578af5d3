"""The two lifecycles alone: what they answer to each event, and what they never do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import IllegalTransition, PeerLost, TransferError
from protocol.ids import Epoch, RequestId
from protocol.messages import Copy, Fetch, Fingerprint, HandoffFailed, Manifest, Pull, Ready, Release, Timing
from tests.transfer.rig import BLOCK_BYTES, D_EPOCH, KEY, P_EPOCH, SLOT_BYTES, make_fingerprint, make_layout
from transfer import receive, send
from transfer.commands import (
    CancelReceives,
    Commit,
    Compute,
    Ended,
    EndLease,
    Fail,
    GrantLease,
    PostReceives,
    PostSends,
    Refuse,
    Say,
    Verify,
)

FINGERPRINT = make_fingerprint(make_layout(10, 3))
POSITION, BLOCKS, SLOT = 10, (4, 2, 7), 2
P_BLOCKS, P_SLOT = (5, 6, 1), 1
ABOUT_D: dict[str, Any] = {"epoch": D_EPOCH, "request_id": KEY.request_id, "generation": KEY.generation}
ABOUT_P: dict[str, Any] = {"epoch": P_EPOCH, "request_id": KEY.request_id, "generation": KEY.generation}


def new_receiver(**changes: Any) -> receive.HandoffReceiver:
    fields: dict[str, Any] = {
        "key": KEY,
        "epoch": D_EPOCH,
        "peer": P_EPOCH,
        "fingerprint": FINGERPRINT,
        "blocks": BLOCKS,
        "slot": SLOT,
        "position": POSITION,
        "token_digest": "t",
        "max_bytes": 64,
        "first_tag": 1000,
    }
    return receive.HandoffReceiver(receive.Reservation(**fields | changes))


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = ABOUT_P | {
        "position": POSITION,
        "token_digest": "t",
        "fingerprint": FINGERPRINT,
        "blocks": P_BLOCKS,
        "slot": P_SLOT,
        "block_checksums": (11, 12, 13),
        "slot_checksum": 14,
        "lease_s": 30.0,
        "timing": Timing(),
        "cached_tokens": 0,
    }
    return Manifest(**fields | changes)


def told(machine: receive.HandoffReceiver, message: Any) -> list[Any]:
    return machine.handle(receive.FromPrefill(message))


def posted(commands: list[Any]) -> list[int]:
    return [command.batch for command in commands if isinstance(command, PostReceives)]


def asked(**changes: Any) -> receive.HandoffReceiver:
    machine = new_receiver(**changes)
    assert machine.handle(receive.Begin()) == [Say(Fetch(**ABOUT_D, have_blocks=changes.get("have_blocks", 0)))]
    return machine


# ---- D ---------------------------------------------------------------------------------------------------------------


def test_receives_are_posted_before_the_pull_that_asks_for_them() -> None:
    post, say = told(asked(), Ready(**ABOUT_P, first_block=0, blocks=(5, 6)))
    assert isinstance(post, PostReceives)
    assert isinstance(say.message, Pull)
    assert [(copy.offset, copy.num_bytes, copy.tag) for copy in say.message.copies] == [
        (5 * BLOCK_BYTES, BLOCK_BYTES, 1000),
        (6 * BLOCK_BYTES, BLOCK_BYTES, 1001),
    ]
    assert [(copy.target_offset, tag) for copy, tag in post.copies] == [(4 * BLOCK_BYTES, 1000), (2 * BLOCK_BYTES, 1001)]


def test_a_copy_takes_a_tag_for_each_message() -> None:
    post, _ = told(asked(), manifest())
    assert [(copy.num_bytes, tag) for copy, tag in post.copies] == [
        (BLOCK_BYTES, 1000),
        (BLOCK_BYTES, 1001),
        (BLOCK_BYTES, 1002),
        (SLOT_BYTES, 1003),
    ]
    long_message = new_receiver(max_bytes=40)
    long_message.handle(receive.Begin())
    post, _ = told(long_message, manifest())
    assert [tag for _, tag in post.copies] == [1000, 1002, 1004, 1006]


def test_verified_pages_are_committed_then_released() -> None:
    machine = asked()
    (early,) = posted(told(machine, Ready(**ABOUT_P, first_block=0, blocks=P_BLOCKS[:2])))
    (late,) = posted(told(machine, manifest()))
    assert machine.handle(receive.CopiesEnded(early)) == []
    assert machine.handle(receive.CopiesEnded(late)) == [Verify(BLOCKS, SLOT)]
    ends = machine.handle(receive.Verified((11, 12, 13), 14))
    assert ends == [Commit(), Say(Release(**ABOUT_D, ok=True)), Ended(ok=True)]


def test_a_prompt_that_d_has_but_for_the_state_needs_only_the_slot() -> None:
    machine = asked(have_blocks=3)
    post, _ = told(machine, manifest())
    assert [copy.region for copy, _ in post.copies] == ["slots"]
    assert machine.handle(receive.CopiesEnded(post.batch)) == [Verify((), SLOT)]
    assert Commit() in machine.handle(receive.Verified((), 14))


@pytest.mark.parametrize(("blocks", "slot"), [((11, 12, 99), 14), ((11, 12, 13), 99)])
def test_a_wrong_checksum_ends_it(blocks: tuple[int, ...], slot: int) -> None:
    machine = asked()
    for tag in posted(told(machine, manifest())):
        machine.handle(receive.CopiesEnded(tag))
    commands = machine.handle(receive.Verified(blocks, slot))
    assert [type(command) for command in commands] == [Fail, Say, Ended]
    assert commands[0].code == "transfer_failed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": 11}, "position 11, not 10"),
        ({"token_digest": "u"}, "other tokens"),
        ({"blocks": (5, 6)}, "2 blocks, not 3"),
        ({"block_checksums": ()}, "checksums are on"),
        ({"slot_checksum": None}, "checksums are on"),
        *(({"fingerprint": FINGERPRINT.model_copy(update={name: "x"})}, f"{name} differs") for name in Fingerprint.model_fields),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    # model_copy doesn't check, so that every field can differ
    commands = told(asked(), manifest().model_copy(update=changes))
    assert [type(command) for command in commands] == [Fail, Say, Ended]
    assert commands[0].code == "mismatch"
    assert message in commands[0].message


@pytest.mark.parametrize(
    "message",
    [
        Ready(**ABOUT_P, first_block=2, blocks=(5, 6)),
        Ready(**ABOUT_P, first_block=-1, blocks=(5,)),
        Ready(**ABOUT_P, first_block=0, blocks=(5, 5)),
    ],
)
def test_blocks_that_make_no_sense_end_it(message: Ready) -> None:
    assert told(asked(), message)[0].code == "transfer_failed"


def test_a_block_that_moved_ends_it() -> None:
    machine = asked()
    told(machine, Ready(**ABOUT_P, first_block=0, blocks=(9,)))
    assert "was at 9 and is now at 5" in told(machine, manifest())[0].message


def test_ready_blocks_told_twice_are_pulled_once() -> None:
    machine = asked()
    told(machine, Ready(**ABOUT_P, first_block=0, blocks=(5, 6)))
    assert told(machine, Ready(**ABOUT_P, first_block=0, blocks=(5, 6))) == []


def test_after_a_failure_pages_wait_for_the_last_receive() -> None:
    machine = asked()
    batches = posted(told(machine, Ready(**ABOUT_P, first_block=0, blocks=P_BLOCKS[:2]))) + posted(told(machine, manifest()))
    commands = machine.handle(receive.PeerGone("killed"))
    assert commands[0] == Fail("prefill_lost", "killed")
    assert commands[-1] == CancelReceives(tuple(batches))
    assert machine.handle(receive.CopiesEnded(batches[0], TransferError("cancelled"))) == []
    assert machine.handle(receive.CopiesEnded(batches[1])) == [Ended(ok=False, reason="killed")]


def test_a_lost_peer_and_a_failed_copy_are_told_apart() -> None:
    for error, code in ((PeerLost("gone"), "prefill_lost"), (TransferError("odd"), "transfer_failed")):
        machine = asked()
        tag = posted(told(machine, manifest()))[0]
        assert machine.handle(receive.CopiesEnded(tag, error))[0].code == code


def test_what_prefill_says_about_itself_reaches_the_router() -> None:
    assert told(asked(), HandoffFailed(**ABOUT_P, code="lease_ended", message="late"))[0] == Fail("lease_ended", "late")


def test_a_cancel_of_the_routers_is_not_told_back() -> None:
    assert [type(command) for command in asked().handle(receive.Cancelled())] == [Say, Ended]


@pytest.mark.parametrize("stale", [{"epoch": Epoch("older")}, {"generation": 1}, {"request_id": RequestId("other")}])
def test_stale_messages_are_rejected_by_value(stale: dict[str, Any]) -> None:
    machine = asked()
    assert told(machine, manifest(**stale)) == []
    assert machine.stale == 1
    assert machine.state is receive.ReceiveState.ASKED


def test_completions_told_twice_or_of_nobody_change_nothing() -> None:
    machine = asked()
    tags = posted(told(machine, manifest()))
    assert machine.handle(receive.CopiesEnded(999)) == []
    for tag in tags:
        machine.handle(receive.CopiesEnded(tag))
        assert machine.handle(receive.CopiesEnded(tag)) == []
    machine.handle(receive.Verified((11, 12, 13), 14))
    for event in (receive.CopiesEnded(tags[0]), receive.Verified((), 0), receive.Cancelled(), receive.PeerGone("x")):
        assert machine.handle(event) == []
    assert told(machine, manifest()) == []


def test_an_illegal_event_tells_the_story() -> None:
    machine = asked()
    with pytest.raises(IllegalTransition, match="Begin is not allowed in state ASKED") as caught:
        machine.handle(receive.Begin())
    assert "NEW -> ASKED: Begin()" in str(caught.value)
    with pytest.raises(IllegalTransition):
        machine.handle(receive.Verified((), 1))


# ---- P ---------------------------------------------------------------------------------------------------------------


def new_sender() -> send.HandoffSender:
    return send.HandoffSender(KEY, P_EPOCH, FINGERPRINT, 30.0)


def sealed() -> send.Sealed:
    made = manifest()
    return send.Sealed(
        position=made.position,
        token_digest=made.token_digest,
        blocks=made.blocks,
        slot=made.slot,
        block_checksums=made.block_checksums,
        slot_checksum=made.slot_checksum,
        timing=made.timing,
    )


def hears(machine: send.HandoffSender, message: Any) -> list[Any]:
    return machine.handle(send.FromDecode(message))


def pull(*copies: tuple[str, int, int], first_tag: int = 1) -> Pull:
    made = tuple(Copy(region=region, offset=offset, num_bytes=size, tag=first_tag + i) for i, (region, offset, size) in enumerate(copies))
    return Pull(**ABOUT_D, copies=made)


def computing() -> send.HandoffSender:
    machine = new_sender()
    assert machine.handle(send.PrefillAsked(D_EPOCH)) == [Compute()]
    return machine


def serving() -> send.HandoffSender:
    machine = computing()
    assert hears(machine, Fetch(**ABOUT_D)) == []
    assert machine.handle(sealed()) == [GrantLease(30.0), Say(manifest())]
    return machine


def test_a_fetch_that_comes_first_is_kept_under_a_lease() -> None:
    machine = new_sender()
    assert hears(machine, Fetch(**ABOUT_D)) == [GrantLease(30.0)]
    assert machine.handle(send.PrefillAsked(D_EPOCH)) == [EndLease(), Compute()]


def test_a_prefill_for_another_decode_worker_than_the_one_that_asked_is_refused() -> None:
    machine = new_sender()
    hears(machine, Fetch(**ABOUT_D))
    commands = machine.handle(send.PrefillAsked(Epoch("someone else")))
    assert [type(command) for command in commands] == [Refuse, EndLease, Say, Ended]


def test_only_the_decode_worker_that_the_router_named_is_served() -> None:
    machine = computing()
    assert hears(machine, Fetch(**ABOUT_D | {"epoch": Epoch("someone else")})) == []
    assert machine.stale == 1
    machine.handle(sealed())
    assert hears(machine, Fetch(**ABOUT_D))[-1] == Say(manifest())


def test_ready_blocks_are_sent_while_the_rest_is_computed() -> None:
    machine = computing()
    machine.handle(send.BlocksReady(0, (5,)))
    assert hears(machine, Fetch(**ABOUT_D)) == [Say(Ready(**ABOUT_P, first_block=0, blocks=(5,)))]
    assert machine.handle(send.BlocksReady(1, (6,))) == [Say(Ready(**ABOUT_P, first_block=1, blocks=(6,)))]
    assert hears(machine, pull(("blocks", 5 * BLOCK_BYTES, 2 * BLOCK_BYTES))) == [
        PostSends(1, (Copy(region="blocks", offset=5 * BLOCK_BYTES, num_bytes=2 * BLOCK_BYTES, tag=1),))
    ]


@pytest.mark.parametrize(
    "copy",
    [
        ("blocks", 1 * BLOCK_BYTES, BLOCK_BYTES),  # of the request, not ready
        ("blocks", 3 * BLOCK_BYTES, BLOCK_BYTES),  # another request's
        ("blocks", 5 * BLOCK_BYTES, 3 * BLOCK_BYTES),  # runs over the end of 6
        ("blocks", 5 * BLOCK_BYTES - 1, 2),
        ("blocks", -BLOCK_BYTES, BLOCK_BYTES),
        ("blocks", 5 * BLOCK_BYTES, 0),
        ("slots", P_SLOT * SLOT_BYTES, SLOT_BYTES),  # not sealed
    ],
)
def test_nothing_but_ready_pages_of_the_request_is_sent(copy: tuple[str, int, int]) -> None:
    machine = computing()
    hears(machine, Fetch(**ABOUT_D))
    machine.handle(send.BlocksReady(0, (5, 6)))
    commands = hears(machine, pull(("blocks", 5 * BLOCK_BYTES, BLOCK_BYTES), copy))
    assert [type(command) for command in commands] == [Say, Ended]
    assert commands[0].message.code == "transfer_failed"


@pytest.mark.parametrize("copy", [("slots", 0, 10), ("slots", P_SLOT * SLOT_BYTES, SLOT_BYTES + 1), ("slots", 2 * SLOT_BYTES, 10)])
def test_nothing_but_the_sealed_slot_is_sent(copy: tuple[str, int, int]) -> None:
    assert isinstance(hears(serving(), pull(copy))[-1], Ended)


def test_a_batch_on_its_way_is_not_sent_again() -> None:
    machine = serving()
    hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10)))
    assert [type(command) for command in hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10)))] == [EndLease, Say]


def test_pages_are_freed_after_the_release_and_the_last_send() -> None:
    machine = serving()
    assert hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10), ("blocks", BLOCK_BYTES, 10)))[0] == GrantLease(30.0)
    assert hears(machine, Release(**ABOUT_D, ok=True)) == [EndLease()]
    assert machine.handle(send.CopiesEnded(2)) == []
    assert machine.handle(send.CopiesEnded(1)) == [Ended(ok=True)]


def test_an_ended_lease_is_said_and_waits_for_the_sends() -> None:
    machine = serving()
    hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10)))
    (said,) = machine.handle(send.LeaseOver())
    assert said.message.code == "lease_ended"
    assert [type(command) for command in machine.handle(send.CopiesEnded(1))] == [Ended]


@pytest.mark.parametrize("event", [send.GaveUp("internal", "x"), send.PeerGone("x"), send.FromDecode(Release(**ABOUT_D, ok=False))])
def test_every_way_to_end_frees_once(event: object) -> None:
    for machine in (computing(), serving()):
        assert sum(isinstance(command, Ended) for command in machine.handle(event)) == 1
        for again in (event, send.PeerGone("y"), sealed(), send.BlocksReady(0, (5,)), send.CopiesEnded(1)):
            assert machine.handle(again) == []


def test_a_prefill_after_the_decode_worker_gave_up_is_refused() -> None:
    machine = new_sender()
    hears(machine, Fetch(**ABOUT_D))
    hears(machine, Release(**ABOUT_D, ok=False, reason="client left"))
    (refusal,) = machine.handle(send.PrefillAsked(D_EPOCH))
    assert isinstance(refusal, Refuse)
    assert "client left" in refusal.message


def test_a_first_fetch_after_the_end_is_answered_a_second_is_not() -> None:
    machine = computing()
    machine.handle(send.GaveUp("draining", "leaving"))
    (say,) = hears(machine, Fetch(**ABOUT_D))
    assert say == Say(HandoffFailed(**ABOUT_P, code="draining", message="leaving"))
    assert hears(machine, Fetch(**ABOUT_D)) == []
    assert hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10))) == []


def test_a_failed_send_ends_it() -> None:
    machine = serving()
    hears(machine, pull(("slots", P_SLOT * SLOT_BYTES, 10)))
    assert [type(command) for command in machine.handle(send.CopiesEnded(1, PeerLost("gone")))] == [EndLease, Say, Ended]


def test_illegal_events_of_the_engine_raise() -> None:
    for machine, event in ((new_sender(), sealed()), (serving(), sealed()), (new_sender(), send.BlocksReady(0, (1,)))):
        with pytest.raises(IllegalTransition):
            machine.handle(event)


SEND_EVENTS: list[object] = [
    send.PrefillAsked(D_EPOCH),
    send.FromDecode(Fetch(**ABOUT_D)),
    send.FromDecode(pull(("blocks", 5 * BLOCK_BYTES, BLOCK_BYTES))),
    send.FromDecode(pull(("slots", P_SLOT * SLOT_BYTES, SLOT_BYTES), first_tag=2)),
    send.FromDecode(Release(**ABOUT_D, ok=True)),
    send.BlocksReady(0, (5, 6)),
    sealed(),
    send.CopiesEnded(1),
    send.CopiesEnded(2, TransferError("x")),
    send.GaveUp("internal", "x"),
    send.PeerGone("x"),
    send.LeaseOver(),
]


@given(st.lists(st.sampled_from(SEND_EVENTS), max_size=25))
@settings(max_examples=300)
def test_in_any_order_p_ends_once_and_never_frees_under_a_send(events: list[object]) -> None:
    machine = new_sender()
    commands: list[Any] = []
    for event in events:
        try:
            answer = machine.handle(event)
        except IllegalTransition:
            continue
        assert not machine.in_flight or not any(isinstance(command, Ended) for command in answer)
        assert not any(isinstance(command, PostSends) for command in answer) or Ended not in map(type, commands)
        commands += answer
    ends = sum(isinstance(command, Ended) for command in commands)
    assert ends == (machine.state is send.SendState.ENDED)
    assert sum(isinstance(command, Compute) for command in commands) <= 1


RECEIVE_EVENTS: list[object] = [
    receive.Begin(),
    receive.FromPrefill(Ready(**ABOUT_P, first_block=0, blocks=P_BLOCKS[:2])),
    receive.FromPrefill(Ready(**ABOUT_P, first_block=1, blocks=P_BLOCKS[1:])),
    receive.FromPrefill(manifest()),
    receive.FromPrefill(HandoffFailed(**ABOUT_P, code="internal", message="x")),
    *(receive.CopiesEnded(batch) for batch in range(1000, 1004)),
    receive.CopiesEnded(1000, TransferError("x")),
    receive.Verified((11, 12, 13), 14),
    receive.Verified((11, 12, 13), 0),
    receive.Cancelled(),
    receive.PeerGone("x"),
]


@given(st.lists(st.sampled_from(RECEIVE_EVENTS), max_size=30))
@settings(max_examples=300)
def test_in_any_order_d_ends_once_and_commits_only_with_everything(events: list[object]) -> None:
    machine = new_receiver()
    commands: list[Any] = []
    for event in events:
        try:
            answer = machine.handle(event)
        except IllegalTransition:
            continue
        assert not machine.in_flight or not any(isinstance(command, Ended) for command in answer)
        if Commit() in answer:
            assert event == receive.Verified((11, 12, 13), 14)
            assert machine.num_bytes == 3 * BLOCK_BYTES + SLOT_BYTES
        commands += answer
    ends = [command for command in commands if isinstance(command, Ended)]
    assert len(ends) == (machine.state is receive.ReceiveState.ENDED)
    assert sum(isinstance(command, Fail) for command in commands) + (Commit() in commands) <= 1
    releases = [command for command in commands if isinstance(command, Say) and isinstance(command.message, Release)]
    assert len(releases) <= 1
