"""What the client makes of servers that hang, drip, flood, lie and break off: the right error, in bounded time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import trustme

from federation.http.client import FederationClient
from federation.http.errors import BlockedAddress, BlockedUrl, BodyTooLarge, NetworkError, classify
from federation.http.guard import AddressGuard
from federation.http.threat_policy import NetworkErrorCode as Code
from federation.http.transport import PoolLimits, pooled_transport
from federation.node.callback import MAX_CALLBACKS
from tests.federation.http.conftest import LOOPBACK, ScriptedResolver
from tests.misbehaving import (
    Behaviour,
    Exchange,
    MisbehavingServer,
    Received,
    bad_chunk,
    close,
    drip_body,
    drip_headers,
    garbage,
    gzip_bomb,
    hang,
    huge_body,
    huge_headers,
    redirect,
    reset,
    reset_mid_body,
    respond,
    send_raw,
    stall_body,
    truncate,
)
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port

SHORT = timedelta(seconds=0.3)
AMPLE = timedelta(seconds=60)  # the exchange must end by itself

FAILURES = {
    "hang": (hang(), SHORT, Code.TIMEOUT),
    "drip-headers": (drip_headers(), SHORT, Code.TIMEOUT),
    "drip-body": (drip_body(), SHORT, Code.TIMEOUT),
    "stall-body": (stall_body(), SHORT, Code.TIMEOUT),
    "close": (close(), AMPLE, Code.UNKNOWN),
    "half-a-status-line": (send_raw(b"HTTP/1.1 2"), AMPLE, Code.UNKNOWN),
    "garbage": (garbage(), AMPLE, Code.UNKNOWN),
    "huge-headers": (huge_headers(), AMPLE, Code.UNKNOWN),
    "reset": (reset(), AMPLE, Code.CONN_RESET),
    "reset-mid-body": (reset_mid_body(), AMPLE, Code.CONN_RESET),
    "truncate": (truncate(), AMPLE, Code.CONN_RESET),
}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", FAILURES)
async def test_failure_has_its_code(
    client: FederationClient, server: MisbehavingServer, name: str, method: str
) -> None:
    """Every way to break an exchange ends, within the deadline, in its own retryable error."""
    server.default, timeout, code = FAILURES[name]
    body = b"secret body" if method == "POST" else None
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"{server.url}/inbox", method=method, body=body, timeout=timeout)
    assert (caught.value.code, caught.value.origin) == (code, server.url)
    assert "secret" not in str(caught.value)


async def test_malformed_chunk_is_a_network_error(client: FederationClient, server: MisbehavingServer) -> None:
    """A body whose framing breaks in the middle is retryable, not a complete body."""
    server.default = bad_chunk()
    with pytest.raises(NetworkError) as caught:
        await client.fetch(server.url)
    assert caught.value.code in (Code.CONN_RESET, Code.UNKNOWN)


async def test_reset_is_not_the_end_of_a_body(server: MisbehavingServer) -> None:
    """A body without a stated length that ends in a reset is a failure, not a complete body."""
    head_arrived = asyncio.Event()

    async def unframed(request: Received, exchange: Exchange) -> None:
        await exchange.send(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"a":')
        await head_arrived.wait()
        exchange.reset()

    server.default = unframed
    async with pooled_transport(LOOPBACK) as transport:
        response = await transport.handle_async_request(httpx.Request("GET", server.url))
        head_arrived.set()
        with pytest.raises(ConnectionResetError) as caught:
            await response.aread()
        await response.aclose()
    assert classify(caught.value) is Code.CONN_RESET


async def test_body_may_end_with_the_connection(client: FederationClient, server: MisbehavingServer) -> None:
    """A body without a stated length that ends in good order is complete."""
    server.default = send_raw(b"HTTP/1.1 200 OK\r\n\r\n{}")
    assert (await client.fetch(server.url)).body == b"{}"


async def test_error_names_the_phase(client: FederationClient, server: MisbehavingServer) -> None:
    """The message tells a failure before the response from one inside its body, and calls a deadline by its name."""
    server.upcoming += [reset(), truncate(), hang()]
    with pytest.raises(NetworkError, match=r"CONN_RESET from http://127\S+: before the response"):
        await client.fetch(server.url)
    with pytest.raises(NetworkError, match="while reading the body"):
        await client.fetch(server.url)
    with pytest.raises(NetworkError, match=r"TIMEOUT from \S+: before the response: TimeoutError$"):
        await client.fetch(server.url, timeout=SHORT)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_fresh_connection_closed_at_once_is_not_retried(
    client: FederationClient, server: MisbehavingServer, method: str
) -> None:
    """A request over a new connection reaches a server that just closes exactly once."""
    server.default = close()
    with pytest.raises(NetworkError):
        await client.fetch(server.url, method=method)
    assert server.hits == 1


@pytest.mark.parametrize("lost", [close(), reset()], ids=["close", "reset"])
async def test_stale_connection_is_replaced(
    client: FederationClient, server: MisbehavingServer, lost: Behaviour
) -> None:
    """A POST that finds its pooled connection dead goes out again on a new one; that one's fate is final."""
    assert (await client.fetch(server.url, method="POST", body=b"1")).ok
    server.upcoming += [lost]
    assert (await client.fetch(server.url, method="POST", body=b"2")).ok
    assert ([request.body for request in server.requests], server.connections) == ([b"1", b"2", b"2"], 2)
    server.default = lost
    with pytest.raises(NetworkError):
        await client.fetch(server.url, method="POST", body=b"3")
    assert [request.body for request in server.requests[3:]] == [b"3", b"3"]


async def test_connection_is_reused(client: FederationClient, server: MisbehavingServer) -> None:
    """Complete exchanges share one connection."""
    for _ in range(5):
        await client.fetch(server.url, method="POST", body=b"{}")
    assert (server.hits, server.connections) == (5, 1)


async def test_half_read_connection_is_not_reused(client: FederationClient, server: MisbehavingServer) -> None:
    """After a deadline inside a body, the next request does not read the rest of the old one."""
    server.upcoming += [drip_body()]
    with pytest.raises(NetworkError):
        await client.fetch(server.url, timeout=SHORT)
    assert (await client.fetch(server.url)).body == b"{}"
    assert server.connections == 2


async def test_cancellation_passes_and_drops_the_connection(
    client: FederationClient, server: MisbehavingServer
) -> None:
    """A cancelled exchange raises CancelledError, nothing else, and its connection is not used again."""
    started = asyncio.Event()

    async def behave(request: object, exchange: object) -> None:
        started.set()
        await asyncio.Event().wait()

    server.upcoming += [behave]
    task = asyncio.create_task(client.fetch(server.url))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.fetch(server.url)).ok
    assert server.connections == 2


async def test_idle_connections_are_bounded(server: MisbehavingServer) -> None:
    """Servers beyond the bound get a new connection each time instead of an idle one."""
    async with (
        MisbehavingServer() as other,
        FederationClient(LOOPBACK, pooled_transport(LOOPBACK, limits=PoolLimits(idle_servers=1))) as client,
    ):
        for url in (server.url, other.url, server.url, other.url):
            await client.fetch(url)
        assert (server.connections, other.connections) == (1, 2)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "streamed"])
async def test_huge_body_is_permanent_and_small_in_memory(
    client: FederationClient, server: MisbehavingServer, announced: bool
) -> None:
    """A body over the cap ends the exchange at the cap, without being held in memory."""
    server.default = huge_body(announced)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match="more than 1048576"):
            await client.fetch(server.url, timeout=AMPLE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 1024 * 1024


async def test_body_of_exactly_the_cap_passes(client: FederationClient, server: MisbehavingServer) -> None:
    """The cap itself is allowed, one byte more is not."""
    server.default = respond(body=b"x" * 1000)
    assert len((await client.fetch(server.url, max_bytes=1000)).body) == 1000
    with pytest.raises(BodyTooLarge):
        await client.fetch(server.url, max_bytes=999)


async def test_gzip_bomb_stays_compressed(client: FederationClient, server: MisbehavingServer) -> None:
    """Compression is declined, and a body that comes compressed all the same is handed over as it is."""
    server.default = gzip_bomb()
    response = await client.fetch(server.url)
    assert len(response.body) < 100_000
    assert response.body[:2] == b"\x1f\x8b"
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_not_followed(client: FederationClient, server: MisbehavingServer, status: int) -> None:
    """A redirect is returned as it is; its target never hears of it."""
    async with MisbehavingServer() as trap:
        server.default = redirect(trap.url, status)
        assert (await client.fetch(server.url, method="POST", body=b"{}")).status == status
        assert (trap.connections, server.hits) == (0, 1)


async def test_cookies_are_neither_kept_nor_sent(server: MisbehavingServer) -> None:
    """A server's cookie does not come back to it: with a cookie, peers enforce an origin list."""
    server.default = respond(headers={"Set-Cookie": "a=b; Path=/"})
    resolver = ScriptedResolver(b_test=[["127.0.0.1"]])
    guard = AddressGuard(frozenset({"b.test"}))
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        await client.fetch(server.url_for("b.test"))
        await client.fetch(server.url_for("b.test"))
    assert "cookie" not in server.requests[1].headers


async def test_environment_proxy_is_ignored(
    client: FederationClient, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies of the environment do not see requests: they would resolve names for us."""
    async with MisbehavingServer() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("http_proxy", proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        await client.fetch(server.url)
        assert (server.hits, proxy.connections) == (1, 0)


async def test_large_request_body_arrives(client: FederationClient, server: MisbehavingServer) -> None:
    """A body of several MiB arrives whole, with its length."""
    body = bytes(range(256)) * 4096 * 3
    await client.fetch(server.url, method="POST", body=body)
    assert server.requests[0].body == body
    assert "transfer-encoding" not in server.requests[0].headers


async def test_refused(client: FederationClient) -> None:
    """A port nobody listens on is CONN_REFUSED."""
    with pytest.raises(NetworkError) as caught:
        await client.fetch(f"http://127.0.0.1:{free_port()}")
    assert caught.value.code is Code.CONN_REFUSED


async def test_refused_on_every_address() -> None:
    """A name with several addresses, all of which refuse, is CONN_REFUSED."""
    resolver = ScriptedResolver(b_test=[["127.0.0.1", "127.0.0.2"]])
    guard = AddressGuard(frozenset({"b.test"}))
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"http://b.test:{free_port()}")
    assert caught.value.code is Code.CONN_REFUSED


async def test_name_that_does_not_resolve() -> None:
    """NXDOMAIN is DNS_BLOCKED."""
    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=ScriptedResolver())) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch("https://b.test/inbox")
    assert (caught.value.code, caught.value.origin) == (Code.DNS_BLOCKED, "https://b.test")


async def test_resolver_that_hangs() -> None:
    """A name service that does not answer is a TIMEOUT at the deadline."""

    class HangingResolver:
        async def resolve(self, host: str, port: int) -> list[str]:
            await asyncio.Event().wait()
            return []

    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=HangingResolver())) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch("https://b.test/inbox", timeout=SHORT)
    assert caught.value.code is Code.TIMEOUT


@pytest.mark.parametrize("host", ["localhost", "localhost.", "foo.localhost", "intranet", "b.example"])
async def test_name_that_leads_to_loopback_is_refused(server: MisbehavingServer, host: str) -> None:
    """A name that resolves to loopback is refused, retryably, before any connection."""
    names = ("localhost", "foo_localhost", "intranet", "b_example")
    resolver = ScriptedResolver(**{name: [["127.0.0.1"]] for name in names})
    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for(host))
    assert server.connections == 0


async def test_mixed_answer_is_refused(server: MisbehavingServer) -> None:
    """One internal address among public ones is enough to refuse the name."""
    resolver = ScriptedResolver(b_test=[["8.8.8.8", "127.0.0.1"]])
    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for("b.test"))
    assert server.connections == 0


async def test_rebinding_between_check_and_connection(server: MisbehavingServer) -> None:
    """The name is asked once, and the vetted address dialled: a second, other answer is never used."""
    resolver = ScriptedResolver(b_test=[["127.0.0.1"], ["127.0.0.2"]])
    guard = AddressGuard(frozenset({"b.test"}))
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        assert (await client.fetch(server.url_for("b.test"))).ok
    assert (resolver.asked, server.requests[0].headers["host"]) == (["b.test"], f"b.test:{server.port}")


async def test_block_heals_with_the_name(server: MisbehavingServer) -> None:
    """A refused answer is not remembered: the name is asked again and again vetted."""
    resolver = ScriptedResolver(b_test=[["10.0.0.1"], ["192.168.0.1"]])
    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        for address in ("10.0.0.1", "192.168.0.1"):
            with pytest.raises(BlockedAddress, match=address):
                await client.fetch(server.url_for("b.test"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_literal_address_is_refused_without_asking(server: MisbehavingServer, host: str) -> None:
    """A literal loopback address is refused for good, whoever would have resolved it."""
    resolver = ScriptedResolver()
    guard = AddressGuard()
    async with FederationClient(guard, pooled_transport(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedUrl):
            await client.fetch(server.url_for(host))
    assert (server.connections, resolver.asked) == (0, [])


async def test_system_resolver_finds_localhost(server: MisbehavingServer) -> None:
    """Without an injected resolver the operating system's answers are vetted: an exempt localhost is reached."""
    guard = AddressGuard(frozenset({"localhost"}))
    async with FederationClient(guard) as client:
        assert (await client.fetch(server.url_for("localhost"))).ok
    async with FederationClient(AddressGuard()) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for("localhost"))


async def test_lookups_that_hang_leave_room_for_others(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers can make us look up names: as many as they can have under way do not delay another's."""
    released = threading.Event()
    getaddrinfo = socket.getaddrinfo

    def slow_for_strangers(host: str, port: int, **options: Any) -> Any:
        if host.endswith(".test"):
            released.wait(PATIENCE_SECONDS)
        return getaddrinfo("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_for_strangers)
    guard = AddressGuard(frozenset({"known"}))
    async with FederationClient(guard) as client:
        for batch in range(3):  # a lookup that was given up goes on for about two deadlines more
            lookups = [client.fetch(f"http://{batch}-{n}.test", timeout=SHORT) for n in range(MAX_CALLBACKS)]
            failures = await asyncio.gather(*lookups, return_exceptions=True)
            assert {str(failure).partition(" ")[0] for failure in failures} == {"TIMEOUT"}
        try:
            assert (await client.fetch(server.url_for("known"), timeout=timedelta(seconds=PATIENCE_SECONDS / 2))).ok
        finally:
            released.set()


async def test_too_many_open_files_is_not_the_servers_fault(
    client: FederationClient, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of descriptors is not a NetworkError: no healthy server may be marked for it."""

    def no_socket(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(Exception, match="Too many open files") as caught:
        await client.fetch(server.url)
    assert not isinstance(caught.value, NetworkError)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority and a client that trusts it, for the name `b.test`."""

    ca: trustme.CA
    guard: AddressGuard

    def client(self) -> FederationClient:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        resolver = ScriptedResolver(b_test=[["127.0.0.1"]])
        return FederationClient(self.guard, pooled_transport(self.guard, resolver=resolver, ssl_context=context))


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
