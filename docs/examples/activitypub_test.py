"""Tests of activitypub_fastapi.py and what it owes: `pytest activitypub_test.py`, with pytest-asyncio."""

from collections.abc import Callable
from datetime import timedelta

import httpx
import pytest

from federation.testing import FakeRemote, FederationNode, OwedActivity

pytest_plugins = ["federation.testing.pytest_plugin"]
pytestmark = pytest.mark.asyncio


@pytest.fixture
def client(federation_node: FederationNode) -> httpx.AsyncClient:
    from activitypub_fastapi import app  # here: it reads the node's settings

    federation_node.app = app  # others reach the node by it, so they find no actor where it shows none
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=federation_node.url)


async def add_note(client: httpx.AsyncClient, remote: FakeRemote, text: str) -> None:
    bob = remote.actor("bob")
    answer = await client.post("/notes", params={"text": text, "to": bob.id, "inbox": bob.inbox})
    assert answer.status_code == 200


async def test_a_note_reaches_bob(
    client: httpx.AsyncClient, federation_node: FederationNode, remote: FakeRemote
) -> None:
    await add_note(client, remote, "hello")
    await federation_node.deliver()
    [note] = remote.received  # he has fetched alice's key from the application, and verified her signature
    assert (note.type, note.activity["object"]["content"]) == ("Create", "hello")


async def test_bob_may_follow_alice(
    client: httpx.AsyncClient, federation_node: FederationNode, remote: FakeRemote
) -> None:
    await add_note(client, remote, "hello")  # the first note makes her an actor
    await remote.follow(f"{federation_node.url}/users/alice")
    await federation_node.receive()
    await federation_node.deliver()
    assert [each.type for each in remote.received] == ["Create", "Accept"]


async def test_a_note_waits_while_bob_is_away(
    client: httpx.AsyncClient,
    federation_node: FederationNode,
    remote: FakeRemote,
    owed: Callable[[], list[OwedActivity]],
) -> None:
    remote.away()
    await add_note(client, remote, "are you back?")
    await federation_node.deliver(within=timedelta(hours=1))
    assert [(each.type, each.state) for each in owed()] == [("Create", "held")]
    remote.back()
    await federation_node.deliver(within=timedelta(hours=1))
    assert owed() == []
    assert len(remote.received) == 1
