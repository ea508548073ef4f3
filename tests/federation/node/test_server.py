"""The listener keeps no connection for longer than it says, and not more of them, whatever clients do."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_network

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from federation.node.clients import REFUSALS, WINDOW, Clients, ClientStanding
from federation.node.server import ConnectionLimits, NodeServer
from tests.patience import PATIENCE_SECONDS, until

SOON = timedelta(milliseconds=200)
HOUR = timedelta(hours=1)
LIMITS = ConnectionLimits(request=HOUR, answer=HOUR, early=HOUR)
"""What ends a connection before a test's patience ends is the one limit that the test shortens."""
HEAD = b"POST / HTTP/1.1\r\nHost: b.example\r\n"
ANSWER = b"x" * 1024 * 1024


async def echo_length(request: Request) -> Response:
    try:
        return PlainTextResponse(str(len(await request.body())))
    except ClientDisconnect:
        return Response(status_code=408)


async def talk(request: Request) -> Response:
    return Response(ANSWER)


async def refuse_unread(request: Request) -> Response:
    return Response(status_code=404)


async def refuse_and_close(request: Request) -> Response:
    return Response(status_code=413, headers={"Connection": "close"})


async def stall(request: Request) -> Response:
    await asyncio.Event().wait()
    return Response()


@asynccontextmanager
async def listening(
    limits: ConnectionLimits, clients: Clients | None = None, standing: ClientStanding | None = None
) -> AsyncIterator[NodeServer]:
    """A server on a port of its own, which is in its `config.port`."""
    app = FastAPI()
    app.add_route("/", echo_length, methods=["POST"])
    app.add_route("/stall", stall, methods=["POST"])
    app.add_route("/talk", talk, methods=["GET"])
    app.add_route("/refuse", refuse_unread, methods=["POST"])
    app.add_route("/close", refuse_and_close, methods=["POST"])
    server = NodeServer(app, grace=timedelta(seconds=1), limits=limits, clients=clients, standing=standing)
    listener = socket.create_server(("127.0.0.1", 0))
    server.config.port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield server
    finally:
        server.request_stop()
        server.request_stop()
        await serving


@asynccontextmanager
async def connected(server: NodeServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the server ends the connection, in good order or not."""
    received = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            while chunk := await reader.read(65536):
                received += chunk
        except ConnectionError:
            pass
    return received


async def drip_headers(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"X: y\r\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD], ids=["nothing", "a word", "half a head"])
async def test_a_client_without_a_request_is_cut(sent: bytes) -> None:
    """Silence does not hold a connection, wherever in a head it begins."""
    async with listening(replace(LIMITS, request=SOON)) as server, connected(server) as (reader, writer):
        writer.write(sent)

        assert await read_to_end(reader) == b""


@pytest.mark.parametrize("before", [b"", HEAD + b"Content-Length: 0\r\n\r\n"], ids=["first request", "second request"])
async def test_headers_one_by_one_hold_no_connection(before: bytes) -> None:
    """The time for a head is counted from its beginning, not from its last byte."""
    async with listening(replace(LIMITS, request=SOON)) as server, connected(server) as (reader, writer):
        writer.write(before + HEAD)
        dripping = asyncio.create_task(drip_headers(writer))

        received = await read_to_end(reader)

        dripping.cancel()
        assert received.count(b"200 OK") == bool(before)


async def test_a_body_has_more_time_than_a_head() -> None:
    """Once the head is there, its time does not run any more."""
    async with listening(replace(LIMITS, request=SOON)) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nx")
        await asyncio.sleep(2 * SOON.total_seconds())
        writer.write(b"x")

        assert (await read_to_end(reader)).endswith(b"\r\n\r\n2")


async def test_a_client_that_reads_no_answer_is_cut() -> None:
    """Requests whose answers nobody takes are given up, with the tasks that wait to send them."""
    async with listening(replace(LIMITS, answer=SOON)) as server, connected(server) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport reads, too
        writer.write(b"GET /talk HTTP/1.1\r\nHost: b.example\r\n\r\n" * 50)
        await until(lambda: bool(server.server_state.tasks))

        await until(lambda: not server.server_state.connections and not server.server_state.tasks)


ENDLESS = HEAD.replace(b"/ ", b"/close ") + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"100000\r\n" + b" " * 0x100000 + b"\r\n"


async def test_a_client_that_still_sends_can_read_its_answer() -> None:
    """Nothing resets its connection under it, and when it has read it is not waited for."""

    def send_all_then_read(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
            client.sendall(ENDLESS + CHUNK * 64)
            return b"".join(iter(lambda: client.recv(65536), b""))

    async with listening(LIMITS) as server:
        answer = await asyncio.to_thread(send_all_then_read, server.config.port)
        await until(lambda: not server.server_state.connections)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_never_ends_is_cut() -> None:
    """Though it was answered, and without its body having been read."""

    async def send_for_ever(writer: asyncio.StreamWriter) -> None:
        writer.write(ENDLESS)
        while True:
            writer.write(CHUNK)
            await writer.drain()

    async with listening(replace(LIMITS, early=SOON)) as server, connected(server) as (_, writer):
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_ever(writer), timeout=PATIENCE_SECONDS)


EMPTY = HEAD + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
UNFINISHED = HEAD + b"Content-Length: 2\r\n\r\nx"


def _serves(server: NodeServer, requests: int) -> bool:
    return len(server.server_state.tasks) == requests


async def ask(server: NodeServer, client: str = "127.0.0.1") -> bytes:
    """The answer to a whole request of the client at that address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port, local_addr=(client, 0))
    writer.write(EMPTY)
    try:
        return await read_to_end(reader)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("connections", "answer"), [(3, b" 503 "), (2, b"")], ids=["the last is told to come back", "one more is not heard"]
)
async def test_connections_are_counted(connections: int, answer: bytes) -> None:
    """Where all of them are being answered there is no room, and room comes back."""
    async with listening(replace(LIMITS, busy=3, connections=connections)) as server:
        async with AsyncExitStack() as stack:
            for number in range(2):
                _, writer = await stack.enter_async_context(connected(server))
                writer.write(UNFINISHED)
                await until(partial(_serves, server, number + 1))
            said = await ask(server)
            assert answer in said
            assert bool(said) is bool(answer)
        await until(lambda: not server.server_state.connections)
        assert b" 200 " in await ask(server)


async def test_idle_connections_shut_nobody_out() -> None:
    """Twice as many as there may be, silent or with half a head: whoever asks is answered, and the newest are kept."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(replace(LIMITS, busy=10, connections=12)))
        idle = [await stack.enter_async_context(connected(server)) for _ in range(20)]
        idle[0][1].write(HEAD)

        assert b" 200 " in await ask(server)

        await until(lambda: len(server.server_state.connections) < 10)
        assert await read_to_end(idle[0][0]) == b""
        idle[-1][1].write(EMPTY)
        assert b" 200 " in await read_to_end(idle[-1][0])


async def test_a_client_has_its_share_of_connections() -> None:
    """Its own idle ones go first; where it is being answered on all of them one more is not heard, but others are."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(replace(LIMITS, per_client=2)))
        idle, _ = await stack.enter_async_context(connected(server))
        for number in range(2):
            _, writer = await stack.enter_async_context(connected(server))
            writer.write(UNFINISHED)
            await until(partial(_serves, server, number + 1))

        assert await read_to_end(idle) == b""
        assert await ask(server) == b""
        assert b" 200 " in await ask(server, "127.0.0.2")


async def test_a_trusted_proxy_has_no_share() -> None:
    """Its connections are those of everybody behind it."""
    clients = Clients([ip_network("127.0.0.0/30")])
    async with listening(replace(LIMITS, per_client=1), clients) as server, connected(server) as (_, busy):
        busy.write(UNFINISHED)
        await until(lambda: bool(server.server_state.tasks))

        assert b" 200 " in await ask(server)


async def test_what_is_only_being_dropped_makes_room() -> None:
    """A client that goes on sending after its answer holds no place for as long as it may read that."""
    async with listening(replace(LIMITS, busy=2, connections=2)) as server, connected(server) as (reader, writer):
        writer.write(ENDLESS)
        await reader.readuntil(b"\r\n\r\n")

        assert b" 200 " in await ask(server)


@pytest.mark.parametrize("moment", ["before the endpoint runs", "while it reads", "after its answer"])
async def test_a_body_that_breaks_its_framing_is_no_fault_of_ours(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends, and the log has no traceback for it."""
    path = b"/" if moment == "while it reads" else b"/refuse"
    head = b"POST " + path + b" HTTP/1.1\r\nHost: b.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = b""
    async with listening(LIMITS) as server, connected(server) as (reader, writer):
        if moment == "before the endpoint runs":
            writer.write(head + b"no chunk\r\n")
        else:
            writer.write(head)
            if moment == "after its answer":
                received = await reader.readuntil(b"\r\n\r\n")
            else:
                await until(lambda: bool(server.server_state.tasks))
            writer.write(b"no chunk\r\n")
        received += await read_to_end(reader)
        await until(lambda: not server.server_state.tasks and not server.server_state.connections)

    assert (b" 404 " if moment == "after its answer" else b" 400 ") in received
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("padding", [b"y" * 20_000, b"y" * 60_000 + b"\r\n\r\n", b" " * 60_000 + b"y\r\n\r\n"])
async def test_a_head_has_a_limit(padding: bytes) -> None:
    """Refused however it arrives: without an end, at once, or blown up with blanks."""
    async with listening(LIMITS) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"X: " + padding)

        assert b" 400 " in await read_to_end(reader)


async def test_a_large_body_behind_a_small_head_is_none_of_the_head() -> None:
    """Though they arrive at once."""
    body = b"x" * 60_000
    async with listening(LIMITS) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        assert (await read_to_end(reader)).endswith(b"60000")


async def test_a_body_that_nobody_reads_takes_little() -> None:
    """However fast it comes, and before anybody has asked who sends it."""
    head = HEAD.replace(b"/ ", b"/stall ") + b"Content-Length: 8000000\r\n\r\n"
    async with listening(LIMITS) as server, connected(server) as (_, writer):
        writer.write(head + b"x" * 4_000_000)
        await until(lambda: any(_unread(each) > 60_000 for each in server.server_state.connections))

        assert all(_unread(each) <= 2 * 65_536 for each in server.server_state.connections)


def _unread(connection: object) -> int:
    cycle = getattr(connection, "cycle", None)
    return len(cycle.body) if cycle is not None else 0


async def test_a_body_framed_twice_ends_the_connection() -> None:
    """Whoever stands before us may have believed the other length: what follows is answered to nobody."""
    twice = HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    async with listening(LIMITS) as server, connected(server) as (reader, writer):
        writer.write(twice + EMPTY)

        answer = await read_to_end(reader)

    assert b" 400 " in answer
    assert b" 200 " not in answer


async def test_a_barred_client_is_answered_before_it_is_read() -> None:
    """However much it sends; others are served, and so is it once it has kept quiet."""
    now = 0.0
    standing = ClientStanding(lambda: now)
    for _ in range(REFUSALS):
        standing.refused("127.0.0.2", 403)
    async with listening(LIMITS, standing=standing) as server:
        told = await ask(server, "127.0.0.2")
        served = await ask(server, "127.0.0.1")
        now += WINDOW.total_seconds()
        served_again = await ask(server, "127.0.0.2")
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"retry-after: 10" in head.lower()
    assert json.loads(body) == {"error": "Too many of your requests were refused; come back later"}
    assert b" 200 " in served
    assert b" 200 " in served_again
