"""The follows inbox: who may follow whom, what is stored, and that repeats change nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from datetime import UTC, datetime

import pytest
from sqlalchemy import delete, update
from sqlmodel import col

from db import Block, Follow, Server, User
from federation.node.app import FOLLOWS_PATH
from federation.protocol.activities import unfollow_activity
from tests.federation.node.conftest import Node, on_both_databases, serving
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol.vectors import FOLLOW

Events = list[MutableMapping[str, object]]


def unfollow(peer: RemoteServer, follower: str = "user-a", followed: str = "user-b") -> str:
    return unfollow_activity(federation_url=peer.url, follower_id=follower, following_id=followed)


@on_both_databases
async def test_a_follow_of_a_public_user_is_stored_accepted_and_acknowledged(
    node: Node, peer: RemoteServer, events: Events
) -> None:
    """The known answer of a follow ends in the row a direct delivery makes, and in an ack the sender can read."""
    body = json.dumps({"method": "FEDERATE", "payload": FOLLOW.envelope, "signature": FOLLOW.signature}).encode()

    response = await node.send(FOLLOWS_PATH, body, peer.headers())

    ack = peer.read_follow_ack(response, node.keys)
    [row] = await node.follows()
    assert (row.follower_id, row.following_id, row.accepted, row.acknowledged) == ("user-a", "user-b", True, False)
    assert (row.follower_server_url, row.following_server_url) == (None, peer.url)
    assert row.id not in ("", "11111111-1111-4111-8111-111111111111")
    assert (ack.following.id, ack.following.accepted, ack.federation_url) == (row.id, True, peer.url)
    assert (ack.following.follower_id, ack.following.following_id) == ("user-a", "user-b")
    assert ack.following.follower_server_url == peer.url
    assert response.json()["status"] == "acknowledged"
    assert {"event": "follow_received", "server_url": peer.url, "follow_id": row.id, "accepted": True} in [
        {name: value for name, value in event.items() if name != "log_level"} for event in events
    ]


@pytest.mark.parametrize(("is_private", "accepted"), [(True, False), (False, True), (None, True)])
async def test_a_follow_waits_where_the_user_is_private(
    node: Node, peer: RemoteServer, is_private: bool | None, accepted: bool
) -> None:
    """Privacy decides acceptance; a user without the setting is public."""
    await node.add(User(id="chosen", is_private=is_private))

    ack = peer.read_follow_ack(await node.follow(peer, followed="chosen"), node.keys)

    [row] = await node.follows()
    assert (row.accepted, ack.following.accepted) == (accepted, accepted)


@on_both_databases
async def test_a_repeated_follow_is_acknowledged_with_the_stored_rows_state(
    node: Node, peer: RemoteServer, events: Events
) -> None:
    """The user accepted meanwhile: the repeat stores nothing and reports the acceptance."""
    await node.add(User(id="private", is_private=True))
    first = peer.read_follow_ack(await node.follow(peer, followed="private"), node.keys)
    async with node.database.transaction() as session:
        await session.execute(update(Follow).values(accepted=True))

    second = peer.read_follow_ack(await node.follow(peer, followed="private"), node.keys)

    assert (first.following.accepted, second.following.accepted) == (False, True)
    assert first.following.id == second.following.id
    assert len(await node.follows()) == 1
    assert [event["event"] for event in events] == ["follow_received", "follow_replayed"]


@on_both_databases
async def test_simultaneous_repeats_of_a_follow_store_one_row(
    node: Node, peer: RemoteServer, database_url: str
) -> None:
    """Twelve deliveries at once, half of them at a second process's node, are all acknowledged with one row."""
    async with serving(database_url) as second:
        responses = await asyncio.gather(*(each.follow(peer) for each in (node, second) * 6))

    [row] = await node.follows()
    assert {peer.read_follow_ack(each, node.keys).following.id for each in responses} == {row.id}


async def test_the_same_users_of_two_servers_make_two_follows(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """User ids are the sending server's own, so another server's equal id is another follower."""
    await node.know(other)

    acks = [each.read_follow_ack(await node.follow(each), node.keys) for each in (peer, other)]

    assert {(row.id, row.following_server_url) for row in await node.follows()} == {
        (acks[0].following.id, peer.url),
        (acks[1].following.id, other.url),
    }


async def test_a_follow_filed_by_a_relay_counts_as_the_same(node: Node, peer: RemoteServer) -> None:
    """A relayed follow has its server in the other column; the direct repeat finds it."""
    row = Follow(
        follower_id="user-a", following_id="user-b", follower_server_url=peer.url, created_at=datetime.now(UTC)
    )
    await node.add(row)

    ack = peer.read_follow_ack(await node.follow(peer), node.keys)

    assert (ack.following.id, ack.following.accepted) == (row.id, False)
    assert len(await node.follows()) == 1


async def test_of_several_old_rows_the_accepted_one_answers(node: Node, peer: RemoteServer) -> None:
    """A database may hold repeats from before; one acceptance is enough."""
    for accepted in (False, True, False):
        await node.add(
            Follow(
                follower_id="user-a",
                following_id="user-b",
                following_server_url=peer.url,
                accepted=accepted,
                created_at=datetime.now(UTC),
            )
        )

    ack = peer.read_follow_ack(await node.follow(peer), node.keys)

    assert ack.following.accepted is True
    assert len(await node.follows()) == 3


async def test_an_unknown_user_cannot_be_followed(node: Node, peer: RemoteServer) -> None:
    """404 USER_NOT_FOUND, and nothing is stored."""
    response = await node.follow(peer, followed="nobody")

    assert (response.status_code, response.json()["code"]) == (404, "USER_NOT_FOUND")
    assert await node.follows() == []


async def test_a_blocked_user_cannot_follow(node: Node, peer: RemoteServer, events: Events) -> None:
    """403 without a code, as peers know it."""
    await node.add(
        User(id="blocked"),
        Block(blocker_id="user-b", blocked_user_id="blocked", created_at=datetime.now(UTC)),
    )

    response = await node.follow(peer, follower="blocked")

    assert response.status_code == 403
    assert set(response.json()) == {"error"}
    assert events[-1]["code"] == "USER_BLOCKED"
    assert await node.follows() == []


async def test_a_local_user_cannot_be_made_to_follow(node: Node, peer: RemoteServer, events: Events) -> None:
    """A remote server may not speak for a user of ours."""
    await node.add(User(id="local"))

    response = await node.follow(peer, follower="local")

    assert (response.status_code, events[-1]["code"]) == (403, "FOLLOWER_IS_LOCAL")
    assert await node.follows() == []


@on_both_databases
async def test_a_server_that_has_just_left_the_registry_is_unknown(
    node: Node, peer: RemoteServer, database_url: str
) -> None:
    """Our cache still knows the server, the database no longer: no row, and the refusal of an unknown server."""
    await node.registry.standing(peer.url)
    async with serving(database_url) as second, second.database.transaction() as session:
        await session.execute(delete(Server).where(col(Server.url) == peer.url))

    response = await node.follow(peer)

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")
    assert await node.follows() == []


@on_both_databases
async def test_an_unfollow_removes_the_follow_and_is_acknowledged_every_time(
    node: Node, peer: RemoteServer, events: Events
) -> None:
    """Gone after the first, still acknowledged after the second; another server's follow stays."""
    await node.follow(peer)
    await node.follow(peer, follower="user-z")

    responses = [await node.deliver(peer, unfollow(peer), "UNFOLLOW") for _ in range(2)]

    for response in responses:
        assert json.loads(peer.read_ack(response, node.keys))["method"] == "UNFOLLOW"
    assert [row.follower_id for row in await node.follows()] == ["user-z"]
    assert [event["removed"] for event in events if event["event"] == "unfollow_received"] == [1, 0]


async def test_a_server_cannot_unfollow_for_another_ones_users(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """The acknowledgment says nothing was left to do; the follow from the other server stays."""
    await node.know(other)
    await node.follow(peer)

    response = await node.deliver(other, unfollow(other), "UNFOLLOW")

    assert other.read_ack(response, node.keys)
    assert len(await node.follows()) == 1


async def test_a_server_cannot_undo_what_our_own_user_follows_there(node: Node, peer: RemoteServer) -> None:
    """Our user's outbound follow names the peer, too, but is ours."""
    await node.add(
        Follow(
            follower_id="user-b",
            following_id="user-a",
            follower_server_url=peer.url,
            accepted=True,
            created_at=datetime.now(UTC),
        )
    )

    response = await node.deliver(peer, unfollow(peer, "user-b", "user-a"), "UNFOLLOW")

    assert peer.read_ack(response, node.keys)
    assert len(await node.follows()) == 1
