"""A node with actors shows them at every path that is no endpoint's, and its endpoints answer as without them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from tests.federation.activitypub.stored import add_actor
from tests.federation.node.conftest import OWN_URL, Node, serving

ALICE = f"{OWN_URL}/users/alice"
ENDPOINTS = (
    ("GET", "/discover"),
    ("POST", "/discover"),
    ("PUT", "/discover"),
    ("POST", "/discover/rotate/init"),
    ("GET", "/api/auth/social/posts"),
    ("POST", "/api/auth/social/posts"),
    ("GET", "/proxy"),
    ("POST", "/proxy"),
)


@pytest.fixture
async def with_actors(database_url: str) -> AsyncIterator[Node]:
    async with serving(database_url, has_actors=True) as node:
        await add_actor(node.database, ALICE, at=datetime.now(UTC))
        yield node


async def test_a_node_shows_its_actors(with_actors: Node) -> None:
    """With how they are found, and what runs here."""
    client = with_actors.client
    actor = await client.get("/users/alice", headers={"Accept": "application/activity+json"})
    finger = await client.get("/.well-known/webfinger", params={"resource": "acct:alice@b.example"})
    index = await client.get("/.well-known/nodeinfo")
    assert actor.json()["publicKey"]["owner"] == ALICE
    assert finger.json()["links"][0]["href"] == ALICE
    assert (await client.get(index.json()["links"][0]["href"])).json()["protocols"] == ["activitypub"]
    assert (await client.get("/users/bob")).json() == {"error": "There is nothing here"}
    assert (await client.post("/users/alice", content=b"{}")).status_code == 405


async def test_endpoints_answer_as_before(with_actors: Node, database_url: str) -> None:
    """Where they refuse a method, too."""
    async with serving(database_url) as without:
        for method, path in ENDPOINTS:
            shown, before = [await node.client.request(method, path) for node in (with_actors, without)]
            assert (shown.status_code, shown.content) == (before.status_code, before.content), (method, path)
        for path in ("/users/alice", "/.well-known/webfinger", "/nodeinfo/2.1"):
            assert (await without.client.get(path)).json() == {"detail": "Not Found"}
