"""What the client makes of servers that hang, drip, flood, lie and break off: the right error, in bounded time."""

from __future__ import annotations

import asyncio
import tracemalloc
from datetime import timedelta

import pytest

from federation.http.client import FederationClient
from federation.http.errors import BodyTooLarge, NetworkError, classify
from federation.http.guard import AddressGuard, parse_target
from federation.http.messages import Request
from federation.http.pool import ConnectionPool, PoolLimits
from federation.http.threat_policy import NetworkErrorCode as Code
from tests.federation.http.conftest import LOOPBACK, SHORT, ScriptedResolver
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


async def test_a_response_that_does_not_begin_in_time(client: FederationClient, server: MisbehavingServer) -> None:
    """The connection is taken and the request read; the patience for the first byte ends it, not the whole deadline."""
    server.default = hang()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(NetworkError, match="before the response") as caught:
            await client.fetch(server.url, timeout=AMPLE, first_byte=SHORT)
    assert caught.value.code is Code.TIMEOUT


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
    pool = ConnectionPool(LOOPBACK)
    request = Request(method="GET", target=parse_target(server.url), headers={}, body=None, max_bytes=100)
    with pytest.raises(ConnectionResetError) as caught:
        await pool.exchange(request, head_arrived.set)
    await pool.aclose()
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
        FederationClient(LOOPBACK, ConnectionPool(LOOPBACK, limits=PoolLimits(idle_servers=1))) as client,
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
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
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
