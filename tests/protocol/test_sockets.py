"""Hub and Link on real TCP."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from protocol.errors import ConfigError
from protocol.sockets import DEAD_AFTER_S, HEARTBEAT_S, Hub, Link

ANYWHERE = "tcp://127.0.0.1:0"
SOON_S = 60.0


async def test_messages_go_both_ways_with_the_senders_identity() -> None:
    with Hub(ANYWHERE) as hub, Link(hub.address, b"one") as one, Link(hub.address, b"two") as two:
        await one.send(b"from one")
        assert await asyncio.wait_for(hub.recv(), SOON_S) == (b"one", b"from one")
        await two.send(b"from two")
        assert await asyncio.wait_for(hub.recv(), SOON_S) == (b"two", b"from two")
        assert await hub.send(b"two", b"to two")
        assert await asyncio.wait_for(two.recv(), SOON_S) == b"to two"


async def test_a_hub_tells_where_it_really_is() -> None:
    with Hub(ANYWHERE) as hub:
        assert hub.address == f"tcp://127.0.0.1:{hub.port}"
        assert hub.port > 0


async def test_a_busy_port_is_named() -> None:
    with Hub(ANYWHERE) as hub, pytest.raises(ConfigError, match=f"{hub.address}: Address already in use"):
        Hub(hub.address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "nonsense", "tcp://256.1.1.1:5"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="can't"):
        Hub(address)
    with pytest.raises(ConfigError, match="can't"):
        Link(address if address != "tcp://256.1.1.1:5" else "nonsense", b"me")


async def test_sending_to_nobody_is_seen() -> None:
    with Hub(ANYWHERE) as hub:
        assert not await hub.send(b"nobody", b"hello")


async def test_a_link_may_dial_first() -> None:
    with Hub(ANYWHERE) as before:
        address = before.address
    with Link(address, b"early") as link:
        await link.send(b"waiting")
        with Hub(address) as hub:
            assert await asyncio.wait_for(hub.recv(), SOON_S) == (b"early", b"waiting")


async def test_a_link_finds_a_hub_that_came_back() -> None:
    with Hub(ANYWHERE) as first, Link(first.address, b"me") as link:
        address = first.address
        await link.send(b"1")
        await asyncio.wait_for(first.recv(), SOON_S)
        first.close()
        with Hub(address) as second:
            await link.send(b"2")
            assert await asyncio.wait_for(second.recv(), SOON_S) == (b"me", b"2")


async def test_the_same_identity_again_takes_over() -> None:
    with Hub(ANYWHERE) as hub, Link(hub.address, b"me") as old:
        await old.send(b"old")
        await asyncio.wait_for(hub.recv(), SOON_S)
        with Link(hub.address, b"me") as new:
            await new.send(b"new")
            assert await asyncio.wait_for(hub.recv(), SOON_S) == (b"me", b"new")
            assert await hub.send(b"me", b"answer")
            assert await asyncio.wait_for(new.recv(), SOON_S) == b"answer"


async def test_messages_that_travel_together_come_one_by_one() -> None:
    with Hub(ANYWHERE) as hub, Link(hub.address, b"me") as link:
        await link.send(b"1", b"2", b"3")
        await link.send(b"4")
        assert [await asyncio.wait_for(hub.recv(), SOON_S) for _ in range(4)] == [(b"me", b"%d" % number) for number in (1, 2, 3, 4)]


async def test_several_links_can_share_a_context() -> None:
    context = zmq.asyncio.Context()
    with Hub(ANYWHERE, context) as hub, Link(hub.address, b"a", context) as a:
        await a.send(b"x")
        assert (await asyncio.wait_for(hub.recv(), SOON_S))[1] == b"x"
    context.term()


async def test_closing_twice_is_fine() -> None:
    hub = Hub(ANYWHERE)
    hub.close()
    hub.close()


def test_a_peer_is_dead_after_three_missed_heartbeats() -> None:
    assert HEARTBEAT_S == 0.5
    assert DEAD_AFTER_S == 1.5


async def test_both_ends_may_be_closed_twice() -> None:
    hub = Hub("tcp://127.0.0.1:0")
    link = Link(hub.address, b"w")
    for end in (link, hub):
        end.close()
        end.close()
