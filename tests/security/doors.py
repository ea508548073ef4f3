"""The doors of a process, and strangers who hold connections to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from federation.node.server import DEFAULT_LIMITS, NodeServer
from tests.patience import PATIENCE_SECONDS, until
from workers.dashboard.serving import LIMITS, DashboardServer, listen
from workers.serving import BoundedServer
from workers.supervisor.http_port import MAX_CONNECTIONS, HttpAnswer, HttpPort

HOUR = timedelta(hours=1)
HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
REQUEST = HALF_A_HEAD + b"Connection: close\r\n\r\n"
STRANGERS = [f"127.0.1.{number}" for number in range(1, 41)]

MOST = {"node": DEFAULT_LIMITS.connections, "dashboard": LIMITS.connections, "metrics": MAX_CONNECTIONS}
"""Of each door, how many connections it keeps. Its time for a head is an hour here: so whoever is cut makes room."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def open_door(name: str) -> AsyncIterator[int]:
    """The port of a node, a dashboard, or of metrics, as a process opens it."""
    if name == "metrics":
        metrics = HttpPort(_scraped, timeout=HOUR)
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        listener.close()
        await metrics.start("127.0.0.1", port)
        yield port
        await metrics.close()
        return
    app = FastAPI()
    app.add_route("/healthz", _well, methods=["GET"])
    server = (
        NodeServer(app, grace=timedelta(seconds=1), limits=replace(DEFAULT_LIMITS, request=HOUR))
        if name == "node"
        else DashboardServer(app, before_stop=lambda: None, limits=replace(LIMITS, request=HOUR))
    )
    async with serving(server) as port:
        yield port


@asynccontextmanager
async def serving(server: BoundedServer) -> AsyncIterator[int]:
    """The port of a server."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield port
    finally:
        server.request_stop()
        server.request_stop()
        await running


@asynccontextmanager
async def idle_connections(
    port: int, count: int, addresses: Sequence[str] = STRANGERS
) -> AsyncIterator[list[Connection]]:
    """So many that ask nothing, in turn from these addresses: every other one has sent half a head."""
    async with AsyncExitStack() as stack:
        made: list[Connection] = []
        for number in range(count):
            address = addresses[number % len(addresses)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            stack.callback(writer.transport.abort)
            if number % 2:
                writer.write(HALF_A_HEAD)
            made.append((reader, writer))
        yield made


async def ask(port: int, request: bytes = REQUEST) -> bytes:
    """All that somebody gets who asks at once."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


def still_open(connections: Sequence[Connection]) -> int:
    """How many the other side has not ended."""
    return sum(not (reader.at_eof() or reader.exception() or writer.is_closing()) for reader, writer in connections)


async def _well(_request: Request) -> Response:
    return PlainTextResponse("well")


async def _scraped(_path: str) -> HttpAnswer:
    return HttpAnswer(status=200, content_type="text/plain", body=b"well")
