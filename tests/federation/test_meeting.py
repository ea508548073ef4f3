"""Two whole nodes get to know each other over HTTP."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlmodel import col
from structlog.testing import capture_logs

from db import Server
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.node.server import NodeServer
from federation.protocol.discovery import register_request
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.patience import until
from tests.peer import Peer, Pings, introduce
from tests.squatters import Squatter


@pytest.fixture
async def nodes(
    migrated_file: Path, tmp_path: Path, make_settings: MakeSettings, ssl_context: ssl.SSLContext
) -> AsyncIterator[tuple[Federation, Federation]]:
    """Two fresh nodes that serve on loopback and know nobody."""
    async with AsyncExitStack() as stack:

        async def fresh(name: str) -> Federation:
            database = shutil.copy(migrated_file, tmp_path / f"{name}.sqlite3")
            listener = socket.create_server(("127.0.0.1", 0))
            settings = make_settings(
                better_auth_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
                database_url=f"sqlite:///{database}",
                **{variable.lower(): value for variable, value in generate_own_keys().to_env().items()},
            )
            guard = AddressGuard(settings.dev_allowed_hostnames)
            node = Federation(settings, client=FederationClient(guard, ConnectionPool(guard, ssl_context=ssl_context)))
            stack.push_async_callback(node.close)
            await stack.enter_async_context(_serving(node, listener))
            return node

        yield await fresh("a"), await fresh("b")


@asynccontextmanager
async def _serving(node: Federation, listener: socket.socket) -> AsyncIterator[None]:
    server = NodeServer(node.node_app(), grace=timedelta(seconds=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield
    finally:
        server.request_stop()
        server.request_stop()
        await serving


def url(node: Federation) -> str:
    assert node.own_url is not None
    return node.own_url


async def proved(node: Federation) -> dict[str, bool]:
    """The servers it knows, and whether they have proved their keys."""
    async with node.database.read() as session:
        found = await session.execute(select(col(Server.url), col(Server.proved_at)))
        return {name: at is not None for name, at in found}


async def test_two_nodes_that_meet_at_once_prove_their_keys(nodes: tuple[Federation, Federation]) -> None:
    """Each registers the other before it introduces itself, so that pings find it known."""
    a, b = nodes

    await asyncio.gather(a.discovery(url(b)), b.discovery(url(a)))

    await until(lambda: _both_proved(a, b))


async def _both_proved(a: Federation, b: Federation) -> bool:
    return (await proved(a), await proved(b)) == ({url(b): True}, {url(a): True})


async def test_one_introduction_proves_both(nodes: tuple[Federation, Federation]) -> None:
    """Who is discovered proves its keys to who discovers it, and the reverse; nothing is refused."""
    a, b = nodes
    with capture_logs() as logs:
        await a.discovery(url(b))
        await until(lambda: _both_proved(a, b))

    assert [entry["event"] for entry in logs if entry["log_level"] != "info"] == []


@pytest.mark.parametrize("pings", [Pings.OPENS_ALL, Pings.UNKNOWN])
async def test_a_node_of_an_earlier_version_meets_this_one(
    nodes: tuple[Federation, Federation], peer: Peer, pings: Pings
) -> None:
    """Whichever of them begins; only who answers pings is known to hold its keys."""
    a, b = nodes
    assert b.keys is not None
    peer.pings = pings
    await a.discovery(peer.url)
    assert url(a) in peer.senders

    introduce(peer, url(b), b.keys.pairs()[0])  # it has looked at our `/discover`
    answer = await b.client.fetch(
        f"{url(b)}/discover",
        method="POST",
        headers={"Content-Type": "application/json"},
        body=register_request(url=peer.url, keys=peer.keys),
    )

    assert answer.status == 200
    assert await proved(a) == await proved(b) == {peer.url: pings is Pings.OPENS_ALL}


async def test_a_squatter_of_a_nodes_keys_is_gone_when_it_comes(nodes: tuple[Federation, Federation]) -> None:
    """As soon as it introduces itself."""
    a, b = nodes
    assert b.keys is not None
    async with Peer(b.keys.pairs()[0]) as shown, Squatter(shown) as squatter:
        await a.discovery(squatter.url)

        await b.discovery(url(a))

        assert await proved(a) == {url(b): True}
