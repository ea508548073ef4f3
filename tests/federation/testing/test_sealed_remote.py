"""A fake server of the sealed wire: introductions, follows and posts, both ways."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select
from sqlmodel import col

import federation
from db import DeliveryState, Follow, User
from federation.testing import FakeSealedRemote, FederationNode, NotTaken

ALICE = "alice"


async def join(node: FederationNode) -> None:
    async with federation.transaction() as session:
        session.add(User(id=ALICE))


async def post() -> None:
    async with federation.transaction() as session:
        await federation.publish_post(session, author_id=ALICE, content=[{"type": "text", "value": "hello"}])


async def test_who_follows_gets_the_posts(federation_node: FederationNode, sealed_remote: FakeSealedRemote) -> None:
    """The remote introduces itself, and the node looks at its keys; then it opens what is sealed to them."""
    await join(federation_node)
    await sealed_remote.follow(ALICE)
    await post()
    [owed] = federation_node.owed()
    assert (owed.type, owed.server) == ("FEDERATE_POST", sealed_remote.url)
    await federation_node.deliver()
    assert federation_node.owed() == []
    [received] = sealed_remote.received
    assert received.activity["post"]["content"] == [{"type": "text", "value": "hello"}]


@pytest.mark.parametrize("accepts", [True, False])
async def test_a_follow_of_ours_is_acknowledged(
    federation_node: FederationNode, sealed_remote: FakeSealedRemote, accepts: bool
) -> None:
    """The node finds the remote by itself; whether the follow is accepted is in its row."""
    await join(federation_node)
    sealed_remote.accepts_follows = accepts
    async with federation.transaction() as session:
        await federation.request_follow(session, follower_id=ALICE, following_id="bob", server_url=sealed_remote.url)
    await federation_node.deliver()
    assert [each.method for each in sealed_remote.received] == ["FEDERATE"]
    async with federation.transaction() as session:
        [accepted] = (await session.execute(select(col(Follow.accepted)))).scalars()
    assert accepted is accepts


async def test_a_post_waits_for_a_remote_that_is_away(
    federation_node: FederationNode, sealed_remote: FakeSealedRemote
) -> None:
    await join(federation_node)
    await sealed_remote.follow(ALICE)
    sealed_remote.away()
    await post()
    await federation_node.deliver(within=timedelta(hours=1))
    assert [each.state for each in federation_node.owed()] == [DeliveryState.HELD]
    sealed_remote.back()
    await federation_node.deliver(within=timedelta(hours=1))
    assert len(sealed_remote.received) == 1


async def test_nobody_follows_who_is_not_there(
    federation_node: FederationNode, sealed_remote: FakeSealedRemote
) -> None:
    with pytest.raises(NotTaken, match="404"):
        await sealed_remote.follow("nobody")
