"""Bodies that never end, over real sockets: nobody but their senders notices, however many of them there are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_network

import httpx
import pytest

from federation.node.app import FOLLOWS_PATH
from federation.node.clients import Clients, ClientStanding, Network
from federation.node.server import NodeServer
from tests.federation.node.conftest import Node, serving
from tests.federation.node.remote_server import RemoteServer
from tests.patience import PATIENCE_SECONDS, until

LENGTH = 65_536
SENT = b"x" * 65_500
JUST_A_PROXY = [ip_network("127.0.0.1/32")]


@dataclass(slots=True)
class Door:
    """A node that listens, with the connections on which bodies never end."""

    port: int
    stack: AsyncExitStack
    reading: list[asyncio.Task[bytes]] = field(default_factory=list)

    async def begin_body(self, address: str, length: int = LENGTH, **headers: str) -> None:
        """A connection from *address* sends all of a body but its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        head = {"Host": "b.example", "Content-Type": "application/json", "Content-Length": str(length), **headers}
        lines = "\r\n".join([f"POST {FOLLOWS_PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())])
        writer.write(f"{lines}\r\n\r\n".encode() + SENT[: length - 1])
        task = asyncio.create_task(_status(reader, writer))
        self.stack.callback(task.cancel)
        self.reading.append(task)

    def answered(self) -> list[bytes]:
        """The statuses of the bodies that were given up."""
        return [task.result() for task in self.reading if task.done()]

    async def follow(self, peer: RemoteServer, node: Node, address: str, **headers: str) -> httpx.Response:
        """The answer to a signed follow that comes from *address*."""
        transport = httpx.AsyncHTTPTransport(local_address=address)
        body = peer.delivery(peer.follow(), "FEDERATE", node.keys)
        async with httpx.AsyncClient(transport=transport, timeout=PATIENCE_SECONDS) as client:
            url = f"http://127.0.0.1:{self.port}{FOLLOWS_PATH}"
            return await client.post(url, content=body, headers={**peer.headers(), **headers})


async def _status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    try:
        with suppress(OSError):
            return (await reader.readline())[9:12]
        return b""
    finally:
        writer.transport.abort()


@asynccontextmanager
async def door(database_url: str, proxies: Sequence[Network] = ()) -> AsyncIterator[Door]:
    """A node behind its listener."""
    async with AsyncExitStack() as stack:
        standing = ClientStanding()
        node = await stack.enter_async_context(serving(database_url, proxies=proxies, standing=standing))
        server = NodeServer(node.app, grace=timedelta(seconds=1), clients=Clients(proxies), standing=standing)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            async with AsyncExitStack() as connections:
                yield Door(port=listener.getsockname()[1], stack=connections)
        finally:
            server.request_stop()
            server.request_stop()
            await serve


@pytest.mark.parametrize(("clients", "each"), [(5, 45), (20, 11)], ids=["a few", "enough for all memory"])
async def test_slow_bodies_shut_no_server_out(
    node: Node, peer: RemoteServer, database_url: str, clients: int, each: int
) -> None:
    """A registered server's follow is taken beside more of them than there is memory for."""
    async with door(database_url) as opened:
        for length in [LENGTH] * each + [1000, 1000, 100]:  # short ones for the rest of the memory
            for number in range(clients):
                await opened.begin_body(f"127.0.1.{number + 1}", length)
        await until(lambda: b"503" in opened.answered())

        answers = [(await opened.follow(peer, node, "127.0.0.6")).status_code for _ in range(10)]

        assert answers == [200] * 10
        assert set(opened.answered()) == {b"503"}


async def test_behind_a_proxy_each_client_has_its_share(node: Node, peer: RemoteServer, database_url: str) -> None:
    """Though all come from the proxy's address, which has no share of connections, and buffers nothing."""
    async with door(database_url, JUST_A_PROXY) as opened:
        for _ in range(300):
            await opened.begin_body("127.0.0.1", **{"X-Forwarded-For": "192.0.2.1"})
        await until(lambda: b"503" in opened.answered())

        answers = [
            (await opened.follow(peer, node, "127.0.0.1", **{"X-Forwarded-For": "198.51.100.1"})).status_code
            for _ in range(10)
        ]

        assert answers == [200] * 10
        assert opened.answered().count(b"503") >= 300 - 768 // 16


async def test_short_slow_bodies_count_as_more_than_their_bytes(
    node: Node, peer: RemoteServer, database_url: str
) -> None:
    """A client has no more than 48 of them at a time, so that behind a proxy they leave connections to others."""
    async with door(database_url, JUST_A_PROXY) as opened:
        for _ in range(100):
            await opened.begin_body("127.0.0.1", 2, **{"X-Forwarded-For": "192.0.2.1"})

        await until(lambda: opened.answered().count(b"503") == 100 - 768 // 16)

        follow = await opened.follow(peer, node, "127.0.0.1", **{"X-Forwarded-For": "192.0.2.1"})
        assert follow.status_code == 200
