"""The posts inbox: what is stored, and that a repeat heals a lost acknowledgment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from datetime import UTC, datetime, timedelta

import pytest

from federation.node.app import POSTS_PATH
from tests.federation.node.conftest import Node, on_both_databases, serving
from tests.federation.node.remote_server import WRITTEN_AT, RemoteServer
from tests.federation.protocol.vectors import POST

Events = list[MutableMapping[str, object]]


@on_both_databases
async def test_a_post_is_stored_and_acknowledged(node: Node, peer: RemoteServer, events: Events) -> None:
    """The known answer of a post, with its non-ASCII text, becomes one row and an ack naming both ids."""
    body = json.dumps({"method": "FEDERATE_POST", "payload": POST.envelope, "signature": POST.signature}).encode()

    response = await node.send(POSTS_PATH, body, peer.headers())

    ack = peer.read_post_ack(response, node.keys)
    [row] = await node.posts()
    sent = json.loads(POST.plaintext)["post"]
    assert row.content == sent["content"]
    assert (row.author_id, row.federated_author_id, row.author_signature) == (None, "user-a", None)
    assert (row.is_local, row.is_private) == (False, False)
    assert row.published == datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    assert timedelta(0) <= datetime.now(UTC) - row.created_at < timedelta(minutes=1)
    assert (row.federation_url, row.federation_post_id) == (peer.url, sent["id"])
    assert (ack.post.id, ack.post.federation_post_id, ack.federation_url) == (row.id, sent["id"], "https://b.example")
    assert "accepted" not in response.json()
    received = [event for event in events if event["event"] == "post_received"]
    assert [(each["post_id"], each["server_url"]) for each in received] == [(row.id, peer.url)]


@on_both_databases
async def test_a_replayed_post_is_acknowledged_with_the_stored_row(
    node: Node, peer: RemoteServer, events: Events
) -> None:
    """Sealed anew as a retry is, the same post answers 200 and adds nothing."""
    acks = [peer.read_post_ack(await node.post(peer), node.keys) for _ in range(3)]

    [row] = await node.posts()
    assert {ack.post.id for ack in acks} == {row.id}
    assert [event["event"] for event in events] == ["post_received", "post_replayed", "post_replayed"]


@on_both_databases
async def test_simultaneous_repeats_of_a_post_store_one_row(node: Node, peer: RemoteServer, database_url: str) -> None:
    """Twelve deliveries at once, half of them at a second process's node, are all acknowledged with one row."""
    async with serving(database_url) as second:
        responses = await asyncio.gather(*(each.post(peer) for each in (node, second) * 6))

    [row] = await node.posts()
    assert {peer.read_post_ack(each, node.keys).post.id for each in responses} == {row.id}


@pytest.mark.parametrize(
    ("text", "published"), [("changed", WRITTEN_AT), ("hello", WRITTEN_AT + timedelta(milliseconds=1))]
)
async def test_another_post_under_a_known_id_is_a_conflict(
    node: Node, peer: RemoteServer, text: str, published: datetime
) -> None:
    """409, and the stored post stays as it was."""
    await node.post(peer)

    response = await node.deliver(peer, peer.post(text=text, published=published), "FEDERATE_POST")

    assert (response.status_code, response.json()["code"]) == (409, "FEDERATED_POST_ALREADY_EXISTS")
    [row] = await node.posts()
    assert row.content[0] == {"type": "text", "value": "hello"}
    assert row.published == WRITTEN_AT


async def test_equal_ids_of_two_servers_are_two_posts(node: Node, peer: RemoteServer, other: RemoteServer) -> None:
    """A post's id is its server's own."""
    await node.know(other)

    responses = [await node.post(each) for each in (peer, other)]

    assert [response.status_code for response in responses] == [200, 200]
    assert {row.federation_url for row in await node.posts()} == {peer.url, other.url}


async def test_a_private_post_stays_private(node: Node, peer: RemoteServer) -> None:
    """The author's choice is stored with the post."""
    private = peer.post().replace('"isPrivate":false', '"isPrivate":true')

    assert (await node.deliver(peer, private, "FEDERATE_POST")).status_code == 200

    [row] = await node.posts()
    assert row.is_private is True


async def test_members_no_peer_knows_are_not_stored(node: Node, peer: RemoteServer) -> None:
    """Blocks keep the members their type has, as at every other server."""
    extended = peer.post().replace('"type":"text"', '"type":"text","onclick":"alert(1)"')

    assert (await node.deliver(peer, extended, "FEDERATE_POST")).status_code == 200

    [row] = await node.posts()
    assert row.content[0] == {"type": "text", "value": "hello"}
