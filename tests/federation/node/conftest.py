"""A node in this process, reached through its ASGI interface, with the peer A in its registry.

`database_url` is an SQLite file; a test marked `on_both_databases` runs on PostgreSQL as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest
import structlog.testing
from fastapi import FastAPI
from sqlalchemy import select

from db import BlacklistedServer, Database, FederationTable, Follow, HostTable, Post, User, create_host_tables
from federation.activitypub.documents import Software
from federation.activitypub.follows import FollowTotals
from federation.activitypub.inbox import ActivitiesInbox
from federation.activitypub.keys import ActorKeys
from federation.activitypub.received import ReceivedJobs
from federation.activitypub.remote_actors import unsigned
from federation.activitypub.remote_keys import RemoteKeys
from federation.activitypub.serving import Serving
from federation.base.queues.queue import tasks_queue
from federation.http.client import FederationClient, FederationFetch
from federation.http.guard import AddressGuard
from federation.node.admission import DELIVERIES
from federation.node.app import FOLLOWS_PATH, POSTS_PATH, NodeParts, create_node_app
from federation.node.clients import Clients, ClientStanding, Network
from federation.node.limits import Limit, MemoryWindows, Windows
from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.protocol.relaying import RELAY_PATH
from federation.runtime.activitypub import admit_fetch
from federation.sealed.peers.discovery import Discovery
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.registry import Registry
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol import vectors
from workers.clock import SystemClock
from workers.storage.memory import MemoryStorage

OWN_URL = "https://b.example"
LOOPBACK = AddressGuard(frozenset({"127.0.0.1"}))

on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node under test, with a client that talks to it and its database to look into."""

    keys: OwnKeys
    database: Database
    registry: Registry
    links: Links
    app: FastAPI
    client: httpx.AsyncClient
    probes: list[tuple[str, int]]

    async def deliver(self, peer: RemoteServer, plaintext: str, method: str, **headers: str) -> httpx.Response:
        """The answer to *plaintext* from *peer*, sent as its worker sends it."""
        return await self.send(
            POSTS_PATH if method == "FEDERATE_POST" else FOLLOWS_PATH,
            peer.delivery(plaintext, method, self.keys),
            {**peer.headers(), **headers},
        )

    async def follow(self, peer: RemoteServer, follower: str = "user-a", followed: str = "user-b") -> httpx.Response:
        return await self.deliver(peer, peer.follow(follower, followed), "FEDERATE")

    async def post(self, peer: RemoteServer, post_id: str = "post-1") -> httpx.Response:
        return await self.deliver(peer, peer.post(post_id), "FEDERATE_POST")

    async def send(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        return await self.client.post(path, content=body, headers=headers)

    async def proxy(self, body: bytes, *, bearer: str = "https://r.example", **headers: str) -> httpx.Response:
        """The answer to a request to `/proxy`, brought by the server *bearer*."""
        named = {"Content-Type": "application/json", "X-Federation-Origin": bearer}
        return await self.send(RELAY_PATH, body, {**named, **headers})

    async def discover(self, body: bytes) -> httpx.Response:
        return await self.send("/discover", body, {"Content-Type": "application/json"})

    async def know(self, peer: RemoteServer) -> None:
        """*peer* is registered."""
        await self.registry.register(
            url=peer.url,
            public_key=peer.keys.signing.public_text,
            encryption_public_key=peer.keys.encryption.public_text,
        )

    async def blacklist(self, url: str) -> None:
        await self.add(BlacklistedServer(server_url=url, created_at=datetime.now(UTC), reason="test"))
        self.registry.forget(url)

    async def add(self, *rows: HostTable | FederationTable) -> None:
        """*rows* are stored, in that order."""
        async with self.database.transaction() as session:
            for row in rows:
                session.add(row)
                await session.flush()

    async def follows(self) -> list[Follow]:
        async with self.database.read() as session:
            return list((await session.execute(select(Follow))).scalars())

    async def posts(self) -> list[Post]:
        async with self.database.read() as session:
            return list((await session.execute(select(Post))).scalars())


@asynccontextmanager
async def serving(
    database_url: str,
    *,
    windows: Windows | None = None,
    proxies: Collection[Network] = (),
    client_address: str = "127.0.0.1",
    per_client: Limit = DELIVERIES,
    per_origin: Limit = DELIVERIES,
    standing: ClientStanding | None = None,
) -> AsyncIterator[Node]:
    """A node on a database that has its tables already; requests come from *client_address*."""
    keys = vectors.B.keys
    database = Database(database_url)
    probes: list[tuple[str, int]] = []

    async def schedule(url: str, attempt: int) -> None:
        probes.append((url, attempt))

    registry = Registry(database, schedule_health_check=schedule)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        client = await stack.enter_async_context(FederationClient(LOOPBACK))
        fetch = FederationFetch(client, mark_unhealthy=registry.mark_unhealthy)
        links = Links(database, registry)
        stack.push_async_callback(links.close)
        identity = OwnIdentity(keys, database)
        discovery = Discovery(own_url=OWN_URL, identity=identity, fetch=fetch, registry=registry, links=links)
        stack.push_async_callback(discovery.close)
        counted, clock = windows or MemoryWindows(), SystemClock()
        actor_keys = ActorKeys(database, None, clock)
        stack.push_async_callback(actor_keys.close)
        software = Software(name="test", version="1")
        totals = FollowTotals(database)
        stack.push_async_callback(totals.close)
        actors = Serving(
            own_url=OWN_URL, keys=actor_keys, database=database, clock=clock, software=software, follows=totals.count
        )
        inbox = ActivitiesInbox(
            own_url=OWN_URL,
            database=database,
            keys=RemoteKeys(
                own_url=OWN_URL, database=database, client=client, guard=LOOPBACK, signer=unsigned, clock=clock
            ),
            blacklist=Blacklist(database, check_interval=timedelta(0)),
            links=links,
            keep=ReceivedJobs(tasks_queue(MemoryStorage()), database=database, joins=False, clock=clock).keep,
            admit=partial(admit_fetch, lambda: counted),
            window=timedelta(hours=1),
            clock=clock,
        )
        app = create_node_app(
            NodeParts(
                own_url=OWN_URL,
                keys=keys,
                database=database,
                registry=registry,
                links=links,
                fetch=fetch,
                guard=LOOPBACK,
                discovery=discovery,
                windows=counted,
                clients=Clients(proxies),
                per_client=per_client,
                per_origin=per_origin,
                standing=standing or ClientStanding(),
                activitypub=(actors, inbox),
            )
        )
        transport = httpx.ASGITransport(app=app, client=(client_address, 1))
        own = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url=OWN_URL))
        yield Node(keys=keys, database=database, registry=registry, links=links, app=app, client=own, probes=probes)


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database_file')}"
    return str(request.getfixturevalue("migrated_postgres_url"))


@pytest.fixture
async def node(database_url: str, peer: RemoteServer) -> AsyncIterator[Node]:
    """A node with a public user `user-b` that knows *peer*."""
    async with serving(database_url) as node:
        async with node.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
        await node.add(User(id="user-b"))
        await node.know(peer)
        yield node


@pytest.fixture
def peer() -> RemoteServer:
    """The server A of the known answers."""
    return RemoteServer(url="https://a.example", keys=vectors.A.keys)


@pytest.fixture
def other() -> RemoteServer:
    """A server with keys of its own that is not registered unless a test does so."""
    return RemoteServer(url="https://c.example", keys=generate_own_keys())


@pytest.fixture
def events() -> Iterator[list[MutableMapping[str, Any]]]:
    """What was logged while the test ran."""
    with structlog.testing.capture_logs() as captured:
        yield captured
