"""What was signed once and is sent again: it is acknowledged as what it is, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from sqlalchemy import delete, select

from db import Follow, FollowNews, User
from federation.node.follows import FOLLOWS_PATH
from federation.protocol.activities import follow_activity, unfollow_activity
from federation.sealed.peers import follow_news
from tests.federation.node.conftest import OWN_URL, Node, on_both_databases
from tests.federation.node.remote_server import RemoteServer

Events = list[MutableMapping[str, object]]

SECOND = timedelta(seconds=1)
LONG_AGO = datetime(1999, 1, 1, tzinfo=UTC)
"""By the peer's clock, which is a quarter of a century behind: only its own times are compared."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What the peer sends, and whoever has seen it sends again, byte for byte."""

    node: Node
    peer: RemoteServer

    def follow(self, follow_id: str, second: int | None) -> bytes:
        told_at = None if second is None else LONG_AGO + second * SECOND
        text = follow_activity(
            federation_url=self.peer.url,
            follow_id=follow_id,
            created_at=told_at or LONG_AGO,
            follower_id="user-a",
            following_id="user-b",
            follower_server_url=None,
        )
        activity = json.loads(text)
        if told_at is None:
            activity["following"]["createdAt"] = None
        return self.peer.delivery(json.dumps(activity), "FEDERATE", self.node.keys)

    def unfollow(self, follow_id: str | None, second: int | None) -> bytes:
        text = unfollow_activity(
            federation_url=self.peer.url,
            follower_id="user-a",
            following_id="user-b",
            follow_id=follow_id,
            ended_at=None if second is None else LONG_AGO + second * SECOND,
        )
        return self.peer.delivery(text, "UNFOLLOW", self.node.keys)

    async def send(self, body: bytes) -> dict[str, object]:
        """The acknowledgment's text, signed by the node and sealed to the peer."""
        response = await self.node.send(FOLLOWS_PATH, body, {"Content-Type": "application/json"})
        return self._read(response)

    async def relay(self, body: bytes) -> dict[str, object]:
        """As `send`, through a relay."""
        text = self.peer.relayed(f"{OWN_URL}{FOLLOWS_PATH}", body)
        return self._read(await self.node.proxy(self.peer.targeted(text, self.node.keys)))

    def _read(self, response: httpx.Response) -> dict[str, object]:
        ack = json.loads(self.peer.read_ack(response, self.node.keys))
        assert isinstance(ack, dict)
        return ack

    async def follows(self) -> int:
        return len(await self.node.follows())


@pytest.fixture
def wire(node: Node, peer: RemoteServer) -> Wire:
    return Wire(node, peer)


@on_both_databases
async def test_an_old_follow_sent_again_does_not_follow_again(wire: Wire, events: Events) -> None:
    """Directly and through a relay; its acknowledgment names it, and says that it is not accepted."""
    follow, unfollow = wire.follow("f-1", 1), wire.unfollow("f-1", 2)
    await wire.send(follow)
    await wire.send(unfollow)

    for ack in (await wire.send(follow), await wire.relay(follow)):
        assert ack["method"] == "FEDERATE"
        assert isinstance(ack["following"], dict)
        assert (ack["following"]["id"], ack["following"]["accepted"]) == ("f-1", False)
    assert await wire.follows() == 0
    assert [event["event"] for event in events] == [
        "follow_received",
        "unfollow_received",
        "follow_outdated",
        "follow_outdated",
    ]


@on_both_databases
async def test_an_old_unfollow_sent_again_does_not_end_a_newer_follow(wire: Wire, events: Events) -> None:
    """Directly and through a relay; it is acknowledged as an unfollow."""
    unfollow = wire.unfollow("f-1", 2)
    for body in (wire.follow("f-1", 1), unfollow, wire.follow("f-2", 3)):
        await wire.send(body)

    acks = [await wire.send(unfollow), await wire.relay(unfollow)]

    assert [ack["method"] for ack in acks] == ["UNFOLLOW", "UNFOLLOW"]
    assert acks[0]["following"] == {
        "id": "f-1",
        "createdAt": "1999-01-01T00:00:02.000Z",
        "followerId": "user-a",
        "followingId": "user-b",
    }
    assert await wire.follows() == 1
    assert [event["event"] for event in events][-2:] == ["unfollow_outdated", "unfollow_outdated"]


async def test_a_follow_that_a_relay_kept_back_comes_too_late(wire: Wire) -> None:
    """The unfollow was here first; also one that had nothing to remove is remembered."""
    await wire.send(wire.unfollow("f-1", 2))
    await wire.relay(wire.follow("f-1", 1))
    assert await wire.follows() == 0
    await wire.send(wire.follow("f-2", 3))
    assert await wire.follows() == 1


async def test_a_follow_whose_row_was_removed_here_is_not_made_again(wire: Wire) -> None:
    """Whoever sends it once more does not undo what the followed user, or the application, has done."""
    follow = wire.follow("f-1", 1)
    await wire.send(follow)
    async with wire.node.database.transaction() as session:
        await session.execute(delete(Follow))
    await wire.send(follow)
    assert await wire.follows() == 0


async def test_an_unfollow_of_an_earlier_version_applies_and_the_follow_stays_ended(wire: Wire) -> None:
    """It has neither id nor time. The follow it ended is not made again by who sends it again."""
    follow, unfollow = wire.follow("f-1", 1), wire.unfollow(None, None)
    await wire.send(follow)
    ack = await wire.send(unfollow)
    assert ack["following"] == {"followerId": "user-a", "followingId": "user-b"}
    await wire.send(follow)
    assert await wire.follows() == 0
    await wire.send(wire.follow("f-2", 2))
    assert await wire.follows() == 1
    await wire.relay(unfollow)
    assert await wire.follows() == 0


async def test_a_clock_that_went_back_does_not_keep_a_follow_from_ending(wire: Wire) -> None:
    """The unfollow names the very follow; that one stays over, and what is newer than both is heard."""
    follow = wire.follow("f-1", 100)
    await wire.send(follow)
    await wire.send(wire.unfollow("f-1", 50))
    assert await wire.follows() == 0
    await wire.send(follow)
    assert await wire.follows() == 0
    await wire.send(wire.follow("f-2", 101))
    assert await wire.follows() == 1


async def test_a_follow_without_a_time_applies(wire: Wire) -> None:
    """Null passes for a time on this wire; whoever sends it cannot be protected, nor be locked out."""
    for body in (wire.follow("f-1", None), wire.unfollow(None, None), wire.follow("f-2", None)):
        await wire.send(body)
    assert await wire.follows() == 1


async def test_one_server_does_not_outdate_what_another_tells(wire: Wire, node: Node, other: RemoteServer) -> None:
    """User ids are each server's own, and so are times."""
    await node.know(other)
    await wire.send(wire.unfollow("f-1", 10**8))
    await Wire(node, other).send(Wire(node, other).follow("f-1", 1))
    assert [row.following_server_url for row in await node.follows()] == [other.url]


async def test_what_is_remembered_of_a_server_is_bounded(
    wire: Wire, node: Node, other: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those noted last stay; no other server's go for them, and no id makes a row longer."""
    monkeypatch.setattr(follow_news, "MOST_PER_SERVER", 3)
    await node.know(other)
    await Wire(node, other).send(Wire(node, other).follow("f", 1))
    for number in range(5):
        text = unfollow_activity(
            federation_url=wire.peer.url,
            follower_id=f"{number}" * 512,
            following_id="user-b",
            follow_id="f" * 512,
            ended_at=LONG_AGO,
        )
        await wire.send(wire.peer.delivery(text, "UNFOLLOW", node.keys))
    async with node.database.read() as session:
        rows = (await session.execute(select(FollowNews).order_by("noted_at"))).scalars().all()
    assert [row.server_url for row in rows] == [other.url, *[wire.peer.url] * 3]
    assert {len(row.id) + len(row.follow_id) for row in rows} == {128}


async def test_no_post_is_taken_in_the_name_of_a_local_user(node: Node, peer: RemoteServer, events: Events) -> None:
    """Directly and through a relay: refused as such a follow is, and nothing is stored."""
    await node.add(User(id="user-a"))
    direct = await node.post(peer)
    text = peer.relayed(f"{OWN_URL}/api/auth/social/posts", peer.delivery(peer.post(), "FEDERATE_POST", node.keys))
    relayed = await node.proxy(peer.targeted(text, node.keys))
    assert (direct.status_code, relayed.status_code) == (403, 403)
    assert [event["code"] for event in events] == ["AUTHOR_IS_LOCAL"] * 2
    assert await node.posts() == []
