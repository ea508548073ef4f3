"""What the client makes of certificates it must not trust, and of TLS that is not there or hangs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
import trustme

from federation.http.client import FederationClient
from federation.http.errors import NetworkError
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.http.threat_policy import NetworkErrorCode as Code
from tests.federation.http.conftest import SHORT, ScriptedResolver
from tests.misbehaving import (
    MisbehavingServer,
)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority and a client that trusts it, for the name `b.test`."""

    ca: trustme.CA
    guard: AddressGuard

    def client(self) -> FederationClient:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        resolver = ScriptedResolver(b_test=[["127.0.0.1"]])
        return FederationClient(self.guard, ConnectionPool(self.guard, resolver=resolver, ssl_context=context))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(trustme.CA(), AddressGuard(frozenset({"b.test", "127.0.0.1"})))


def _server_context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


async def test_valid_certificate(authority: Authority) -> None:
    """A certificate of a trusted authority for the right name is accepted, by name, not by address."""
    certificate = authority.ca.issue_cert("b.test")
    async with MisbehavingServer(_server_context(certificate)) as server, authority.client() as client:
        assert (await client.fetch(server.url_for("b.test"))).ok
        assert (await client.fetch(server.url_for("b.test") + "/again")).ok
        assert server.connections == 1


@pytest.mark.parametrize("flaw", ["unknown authority", "expired", "wrong name"])
async def test_wrong_certificate(authority: Authority, flaw: str) -> None:
    """A certificate that does not prove the name is TLS_ERROR, and no request is sent."""
    certificate = {
        "unknown authority": lambda: trustme.CA().issue_cert("b.test"),
        "expired": lambda: authority.ca.issue_cert("b.test", not_after=datetime(2020, 1, 1, tzinfo=UTC)),
        "wrong name": lambda: authority.ca.issue_cert("c.test"),
    }[flaw]()
    async with MisbehavingServer(_server_context(certificate)) as server, authority.client() as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(server.url_for("b.test"), method="POST", body=b"{}")
    assert (caught.value.code, server.hits) == (Code.TLS_ERROR, 0)


async def test_tls_to_a_plain_port(authority: Authority) -> None:
    """HTTPS to a server that answers in plain text is TLS_ERROR."""

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, authority.client() as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"https://b.test:{port}")
    assert caught.value.code is Code.TLS_ERROR


async def test_plain_http_to_a_tls_port(authority: Authority) -> None:
    """Plain HTTP to a TLS port is UNKNOWN or a reset, as the server chooses, and retryable."""
    context = _server_context(authority.ca.issue_cert("b.test"))
    async with MisbehavingServer(context) as server, authority.client() as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"http://b.test:{server.port}")
    assert caught.value.code in (Code.UNKNOWN, Code.CONN_RESET)


async def test_tls_handshake_that_hangs(authority: Authority) -> None:
    """A server that accepts and never shakes hands is a TIMEOUT at the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with authority.client() as client:
            with pytest.raises(NetworkError) as caught:
                await client.fetch(f"https://b.test:{silent.getsockname()[1]}", timeout=SHORT)
    assert caught.value.code is Code.TIMEOUT
