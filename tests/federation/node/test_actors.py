"""A node with actors shows them at every path that is no endpoint's, and its endpoints answer as without them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from db import create_host_tables
from federation import activitypub
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt, release
from tests.federation.conftest import OWN_URL, MakeSettings

ALICE = f"{OWN_URL}/users/alice"
ENDPOINTS = (
    ("PUT", "/discover"),
    ("POST", "/discover"),
    ("GET", "/discover/rotate/init"),
    ("POST", "/discover/rotate/init"),
    ("GET", "/api/auth/social/posts"),
    ("POST", "/api/auth/social/posts"),
    ("GET", "/proxy"),
    ("POST", "/proxy"),
    ("DELETE", "/healthz"),
)


@asynccontextmanager
async def serving(make_settings: MakeSettings, *, actors: bool) -> AsyncIterator[tuple[Federation, httpx.AsyncClient]]:
    """A node by its settings, and who asks it."""
    node = Federation(make_settings(federation_activitypub=actors))
    adopt(node)
    async with node.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
    transport = httpx.ASGITransport(app=node.node_app())
    async with httpx.AsyncClient(transport=transport, base_url=OWN_URL) as client:
        yield node, client
    release()
    await node.close()


async def test_a_node_shows_its_actors(make_settings: MakeSettings) -> None:
    """With how they are found, and what runs here."""
    async with serving(make_settings, actors=True) as (node, client):
        async with node.database.transaction() as session:
            added = await activitypub.add_actor(session, ALICE)
        actor = await client.get("/users/alice", headers={"Accept": "application/activity+json"})
        finger = await client.get("/.well-known/webfinger", params={"resource": "acct:alice@a.example"})
        assert (await client.get("/users/alice/followers")).json()["totalItems"] == 0
        index = await client.get("/.well-known/nodeinfo")
        assert actor.json()["publicKey"] == {"id": added.key_id, "owner": ALICE, "publicKeyPem": added.public_pem}
        assert finger.json()["links"][0]["href"] == ALICE
        assert (await client.get(index.json()["links"][0]["href"])).json()["protocols"] == ["activitypub"]
        assert (await client.get("/users/bob")).json() == {"error": "There is nothing here"}
        assert (await client.post("/users/alice", content=b"{}")).status_code == 405


async def test_endpoints_answer_as_before(make_settings: MakeSettings) -> None:
    """Where they refuse a method, too; and without actors all other paths do."""
    answers: list[list[tuple[int, bytes]]] = []
    for actors in (True, False):
        async with serving(make_settings, actors=actors) as (_, client):
            replies = [await client.request(method, path) for method, path in ENDPOINTS]
            answers.append([(reply.status_code, reply.content) for reply in replies])
            found = await client.get("/nodeinfo/2.1")
            assert found.status_code == (200 if actors else 404)
    assert answers[0] == answers[1]
    assert found.json() == {"detail": "Not Found"}
