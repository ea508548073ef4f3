"""What TLS carries, and what may come in it that is no part of a response."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import trustme

from federation.http.client import FederationClient
from federation.http.errors import NetworkError
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.http.threat_policy import NetworkErrorCode as Code
from tests.federation.http.conftest import ScriptedResolver
from tests.misbehaving import (
    Exchange,
    MisbehavingServer,
    Received,
    close,
    reset_mid_body,
    respond,
    send_raw,
    truncate,
)

BIG = os.urandom(700_000)
"""Dozens of records."""


@pytest.fixture
def server_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def client(authority: trustme.CA, server_context: ssl.SSLContext) -> AsyncIterator[FederationClient]:
    """A client that trusts the server of `server_context` as `b.test`."""
    authority.issue_cert("b.test").configure_cert(server_context)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    guard = AddressGuard(frozenset({"b.test"}))
    pool = ConnectionPool(guard, resolver=ScriptedResolver(b_test=[["127.0.0.1"]]), ssl_context=context)
    async with FederationClient(guard, pool) as open_client:
        yield open_client


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_long_bodies(client: FederationClient, server_context: ssl.SSLContext, version: ssl.TLSVersion) -> None:
    """Bodies of many records arrive whole, in both directions, one exchange after another on one connection."""
    server_context.maximum_version = version
    async with MisbehavingServer(server_context) as server:
        server.default = respond(body=BIG)
        for _ in range(3):
            response = await client.fetch(server.url_for("b.test"), method="POST", body=BIG)
            assert (response.status, response.body) == (200, BIG)
        assert [request.body for request in server.requests] == [BIG] * 3
        assert server.connections == 1


async def test_who_answers_is_told_by_certificate(
    client: FederationClient, authority: trustme.CA, server_context: ssl.SSLContext
) -> None:
    """The same over several connections, and another once the certificate is renewed."""
    async with MisbehavingServer(server_context) as server:
        server.default = respond(headers={"Connection": "close"})
        answerers = [(await client.fetch(server.url_for("b.test"))).answerer for _ in range(2)]
        authority.issue_cert("b.test").configure_cert(server_context)
        answerers += [(await client.fetch(server.url_for("b.test"))).answerer for _ in range(2)]
        assert server.connections == 4
    first, second, third, fourth = answerers
    assert first == second != third == fourth


async def test_the_end_of_a_body(client: FederationClient, server_context: ssl.SSLContext) -> None:
    """A farewell ends a body without a length; any other body is broken by it, and an answer without a byte is none."""
    async with MisbehavingServer(server_context) as server:
        server.upcoming += [send_raw(b"HTTP/1.1 200 OK\r\n\r\nall of it"), truncate(), reset_mid_body(), close()]
        assert (await client.fetch(server.url_for("b.test"))).body == b"all of it"
        for expected in (Code.CONN_RESET, Code.CONN_RESET, Code.UNKNOWN):
            with pytest.raises(NetworkError) as caught:
                await client.fetch(server.url_for("b.test"))
            assert caught.value.code is expected


async def test_a_broken_record(client: FederationClient, server_context: ssl.SSLContext) -> None:
    """What is no TLS in the midst of it is TLS_ERROR."""

    async def in_clear(request: Received, exchange: Exchange) -> None:
        os.write(exchange.writer.get_extra_info("socket").fileno(), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await asyncio.Event().wait()

    async with MisbehavingServer(server_context) as server:
        server.default = in_clear
        with pytest.raises(NetworkError) as caught:
            await client.fetch(server.url_for("b.test"))
    assert caught.value.code is Code.TLS_ERROR


async def test_a_flood_of_tickets(client: FederationClient, server_context: ssl.SSLContext) -> None:
    """A server that sends half a megabyte before its response, and none of it a response, gets no more."""
    server_context.num_tickets = 3000
    async with MisbehavingServer(server_context) as server:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(server.url_for("b.test"))
    assert caught.value.code is Code.UNKNOWN


async def test_a_handshake_that_ends_early(client: FederationClient) -> None:
    """A server that closes at once is CONN_RESET, at once."""

    async def nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(nothing, "127.0.0.1", 0)
    async with listener:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"https://b.test:{listener.sockets[0].getsockname()[1]}")
    assert caught.value.code is Code.CONN_RESET


async def test_a_refused_certificate_is_told(server_context: ssl.SSLContext) -> None:
    """The server hears why its certificate is refused, so that its operator can."""
    trustme.CA().issue_cert("127.0.0.1").configure_cert(server_context)
    guard = AddressGuard(frozenset({"127.0.0.1"}))
    heard: asyncio.Future[ssl.SSLError] = asyncio.get_running_loop().create_future()

    def serve(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        try:
            with server_context.wrap_socket(accepted, server_side=True) as shaken:
                shaken.recv(1)
        except ssl.SSLError as error:
            heard.get_loop().call_soon_threadsafe(heard.set_result, error)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with FederationClient(guard) as client:
            serving = asyncio.create_task(asyncio.to_thread(serve, listening))
            with pytest.raises(NetworkError):
                await client.fetch(f"https://127.0.0.1:{listening.getsockname()[1]}")
            await serving
            assert "UNKNOWN_CA" in (await heard).reason
