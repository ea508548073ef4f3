"""A server that is thought to be away, and is heard of: it is looked at now, and believed to be back by nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from db import LinkState, ServerLink
from federation.protocol.keys import generate_own_keys
from tests.federation.node.conftest import Node
from tests.federation.node.remote_server import RemoteServer
from tests.misbehaving import MisbehavingServer, respond


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as running:
        yield running


async def take_down(node: Node, url: str) -> None:
    """As it is some minutes later: its next look is not due for some more."""
    await node.links.exhausted(url, "CONN_REFUSED", first_attempted_at=datetime.now(UTC))
    for _ in range(5):
        await node.links.probe_failed(url)
    looked = update(ServerLink).values(probed_at=datetime.now(UTC) - timedelta(minutes=1))
    async with node.database.transaction() as session:
        await session.execute(looked)
    node.links.forget(url)
    assert not await is_looked_at_now(node, url)


async def is_looked_at_now(node: Node, url: str) -> bool:
    """Whether the server, which is still down, is due for a look."""
    link = await node.links.find(url)
    assert link.state is LinkState.DOWN
    assert link.next_probe_at is not None
    return link.next_probe_at <= datetime.now(UTC) + timedelta(seconds=1)


async def test_a_verified_delivery_brings_the_look_forward(node: Node, peer: RemoteServer) -> None:
    await take_down(node, peer.url)
    assert (await node.post(peer)).status_code == 200
    assert await is_looked_at_now(node, peer.url)


async def test_a_delivery_that_does_not_verify_proves_nothing(node: Node, peer: RemoteServer) -> None:
    """Anybody can name a server."""
    await take_down(node, peer.url)
    stranger = RemoteServer(url=peer.url, keys=generate_own_keys())
    assert (await node.post(stranger)).status_code >= 400
    assert not await is_looked_at_now(node, peer.url)


async def test_a_registration_brings_the_look_forward(node: Node, server: MisbehavingServer) -> None:
    remote = RemoteServer(url=server.url, keys=generate_own_keys())
    server.routes["/discover"] = respond(body=remote.document())
    await node.know(remote)
    await take_down(node, remote.url)
    assert (await node.discover(remote.register())).status_code == 200
    assert await is_looked_at_now(node, remote.url)
