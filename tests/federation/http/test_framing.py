"""Where a response begins and ends, and which connection may carry the next request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta

import pytest

from federation.http.client import FederationClient
from federation.http.connection import MAX_HEAD_BYTES, MAX_INTERIM, ResponseReader
from federation.http.errors import BodyTooLarge, NetworkError
from federation.http.guard import AddressGuard
from federation.http.messages import Request
from federation.http.pool import ConnectionPool, PoolLimits
from federation.http.threat_policy import NetworkErrorCode as Code
from tests.federation.http.conftest import LOOPBACK, SHORT
from tests.misbehaving import Behaviour, Exchange, MisbehavingServer, Received, respond
from tests.patience import until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def sends(*pieces: bytes) -> Behaviour:
    """Sends these pieces, and keeps the connection."""

    async def behave(request: Received, exchange: Exchange) -> None:
        for piece in pieces:
            await exchange.send(piece)

    return behave


async def test_what_precedes_a_response_is_skipped(client: FederationClient, server: MisbehavingServer) -> None:
    """Interim responses are none; the final one's headers alone count, and the connection goes on."""
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\n\r\n"
    server.upcoming += [sends(early + OK), sends(early, OK)]
    for _ in range(2):
        response = await client.fetch(server.url, method="POST", body=b"{}")
        assert (response.status, response.body, "retry-after" in response.headers) == (200, b"{}", False)
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 102 Processing\r\n\r\n" * (MAX_INTERIM + 1) + OK,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-Thing: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/2 200\r\n\r\n{}",
    ],
    ids=["interim", "upgrade", "two-framings", "two-lengths", "long-length", "negative", "long-header", "http2"],
)
async def test_ambiguous_framing_is_no_response(
    client: FederationClient, server: MisbehavingServer, answer: bytes
) -> None:
    """Two readers of it might disagree; it is retryable, at once, and the connection is gone."""
    server.upcoming += [sends(answer)]
    with pytest.raises(NetworkError) as caught:
        await client.fetch(server.url)
    assert caught.value.code is Code.UNKNOWN
    assert (await client.fetch(server.url)).ok
    assert server.connections == 2


@pytest.mark.parametrize(
    "pieces",
    [(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n{'no'}",), (OK + b"x",), (OK, b"HTTP/1.1 500 No\r\n\r\n")],
    ids=["a-second-response", "a-byte", "later"],
)
async def test_more_than_was_asked_for_spoils_the_connection(
    client: FederationClient, server: MisbehavingServer, pieces: tuple[bytes, ...]
) -> None:
    """A response that nobody asked for answers no other request."""
    closed = asyncio.Event()

    async def talkative(request: Received, exchange: Exchange) -> None:
        for piece in pieces:
            await exchange.send(piece)
        assert await exchange.reader.read() == b""
        closed.set()

    server.upcoming += [talkative]
    assert (await client.fetch(server.url)).body == b"{}"
    await closed.wait()
    assert (await client.fetch(server.url)).body == b"{}"
    assert server.connections == 2


async def test_a_body_in_tiny_pieces_is_too_large(client: FederationClient, server: MisbehavingServer) -> None:
    """What frames a body is bounded as the body is: a chunk's extension may be of any length."""
    chunk = b"1;" + b"x" * 60_000 + b"\r\n{\r\n"
    server.default = sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[chunk] * 30)
    with pytest.raises(BodyTooLarge):
        await client.fetch(server.url, max_bytes=100_000)


async def test_trailers_are_no_headers(client: FederationClient, server: MisbehavingServer) -> None:
    """They come after the body was believed."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nRetry-After: 5\r\n\r\n"
    server.default = sends(chunked)
    for _ in range(2):
        response = await client.fetch(server.url)
        assert (response.body, dict(response.headers)) == (b"{}", {"transfer-encoding": "chunked"})
    assert server.connections == 1


async def test_a_head_has_no_body(client: FederationClient, server: MisbehavingServer) -> None:
    """Whatever length it announces."""
    server.default = sends(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n")
    for _ in range(2):
        response = await client.fetch(server.url, method="HEAD")
        assert (response.body, response.headers["content-length"]) == (b"", "20")


@pytest.mark.parametrize("status", [204, 304])
async def test_some_statuses_have_no_body(client: FederationClient, server: MisbehavingServer, status: int) -> None:
    """And leave the connection to the next request."""
    server.default = sends(f"HTTP/1.1 {status} Whatever\r\n\r\n".encode())
    for _ in range(2):
        response = await client.fetch(server.url)
        assert (response.status, response.body) == (status, b"")
    assert server.connections == 1


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"])
async def test_a_server_that_wants_to_close_is_let(
    client: FederationClient, server: MisbehavingServer, head: bytes
) -> None:
    """The response is whole; the next request goes over another connection."""
    server.default = sends(head + b"Content-Length: 2\r\n\r\n{}")
    for _ in range(2):
        assert (await client.fetch(server.url)).body == b"{}"
    assert server.connections == 2


async def test_headers_of_a_name_are_one(client: FederationClient, server: MisbehavingServer) -> None:
    """In any case, joined, and only as texts."""
    answer = b"HTTP/1.1 200 OK\r\nX-Thing: a\r\nx-thing: b\xff\r\nContent-Length: 0\r\n\r\n"
    server.default = sends(answer)
    headers = (await client.fetch(server.url)).headers
    assert headers["X-THING"] == "a, b\xff"
    assert len(headers) == 2
    assert headers.get("x-other") is None


async def test_of_many_lines_that_ask_for_a_pause_the_longest_counts(
    client: FederationClient, server: MisbehavingServer
) -> None:
    """Seconds and dates, from whoever stands between."""
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    lines = [f"Retry-After: {seconds}\r\n" for seconds in range(48)]
    lines[20:20] = ["Retry-After: Fri, 02 Jan 2026 03:06:05 GMT\r\n", "Retry-After: soon\r\n"]
    server.default = sends(f"HTTP/1.1 429 Whatever\r\n{''.join(lines)}Content-Length: 0\r\n\r\n".encode())
    assert (await client.fetch(server.url)).retry_after(now) == timedelta(seconds=120)


async def test_who_answers_is_told_by_address() -> None:
    """The same on a kept connection and on another, whatever the port; another at another address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(OK)
        writer.close()

    addresses = ["127.0.0.1", "127.0.0.2"]
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(FederationClient(AddressGuard(frozenset(addresses))))
        answerers = []
        for address in (addresses[0], *addresses):
            listening = await stack.enter_async_context(await asyncio.start_server(serve, address))
            port = listening.sockets[0].getsockname()[1]
            answerers += [(await client.fetch(f"http://{address}:{port}")).answerer for _ in range(2)]
        await client.close()
    assert answerers[:4] == [answerers[0]] * 4
    assert answerers[4] == answerers[5] != answerers[0]


@pytest.mark.parametrize("value", ["a\r\nX-Evil: b", "a\nb", "a\rb", "a\0b", "ä"])
async def test_a_header_is_one_line(client: FederationClient, server: MisbehavingServer, value: str) -> None:
    """What would end a header, or is not ASCII, is the caller's mistake; nothing is sent."""
    for headers in ({"X-Thing": value}, {f"X-{value}": "thing"}):
        with pytest.raises(ValueError, match=r"line break|ascii"):
            await client.fetch(server.url, headers=headers)
    assert server.hits == 0


async def test_what_frames_a_request_is_ours(client: FederationClient, server: MisbehavingServer) -> None:
    """A caller's headers do not say where a request ends or for whom it is; a POST of nothing says so."""
    headers = {"content-length": "5", "Transfer-Encoding": "chunked", "HOST": "evil.test", "connection": "close"}
    await client.fetch(f"{server.url}/a%20b?c=%C3%A4", method="POST", headers=headers)
    await client.fetch(server.url, method="POST", headers=headers, body=b"{}")
    framing = [(each.path, each.headers["host"], each.headers["content-length"]) for each in server.requests]
    host = server.url.removeprefix("http://")
    assert framing == [("/a%20b?c=%C3%A4", host, "0"), ("/", host, "2")]
    assert all("transfer-encoding" not in each.headers for each in server.requests)
    assert server.connections == 1


async def most_at_once(limits: PoolLimits, urls: Callable[[], list[str]], servers: list[MisbehavingServer]) -> int:
    """How many requests were under way at once, of as many as there are URLs."""
    pool, release, under_way, most = ConnectionPool(LOOPBACK, limits=limits), asyncio.Event(), 0, 0

    async def counts(request: Received, exchange: Exchange) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        await respond()(request, exchange)

    for server in servers:
        server.default = counts
    async with FederationClient(LOOPBACK, pool) as client:
        fetches = [asyncio.create_task(client.fetch(url)) for url in urls()]
        await until(lambda: under_way == min(limits.connections, limits.connections_per_server * len(servers)))
        fetches.pop().cancel()  # whoever waits may give up, and takes no place with it
        release.set()
        assert all(response.ok for response in await asyncio.gather(*fetches))
    return most


async def test_connections_to_a_server_are_bounded(server: MisbehavingServer) -> None:
    """Requests beyond the bound wait, and get their turn."""
    limits = PoolLimits(connections_per_server=2)
    assert await most_at_once(limits, lambda: [server.url] * 7, [server]) == 2


async def test_connections_are_bounded(server: MisbehavingServer) -> None:
    """Over all servers."""
    async with MisbehavingServer() as other:
        limits = PoolLimits(connections=3)
        assert await most_at_once(limits, lambda: [server.url, other.url] * 4, [server, other]) == 3


async def test_an_idle_connection_is_closed_by_itself(server: MisbehavingServer) -> None:
    """Although nobody asks for its server again; the pool forgets the server with it."""
    ended = asyncio.Event()

    async def listens(request: Received, exchange: Exchange) -> None:
        await respond()(request, exchange)
        assert await exchange.reader.read() == b""
        ended.set()

    server.upcoming += [listens]
    pool = ConnectionPool(LOOPBACK, limits=PoolLimits(kept_seconds=0.05))
    async with FederationClient(LOOPBACK, pool) as client:
        assert (await client.fetch(server.url)).ok
        await ended.wait()
        assert (await client.fetch(server.url)).ok
    assert server.connections == 2


async def test_a_closed_client_opens_nothing(server: MisbehavingServer) -> None:
    """What still runs fails at once, what begins later as well."""
    arrived = asyncio.Event()

    async def never(request: Received, exchange: Exchange) -> None:
        arrived.set()
        await asyncio.Event().wait()

    server.upcoming += [never]
    client = FederationClient(LOOPBACK)
    running = asyncio.create_task(client.fetch(server.url, timeout=timedelta(seconds=60)))
    await arrived.wait()
    await client.close()
    with pytest.raises(NetworkError):
        await running
    with pytest.raises(RuntimeError, match="closed"):
        await client.fetch(server.url, timeout=SHORT)


async def test_requests_of_one_connection_follow_each_other(
    client: FederationClient, server: MisbehavingServer
) -> None:
    """Many at once share a few connections, and each gets its own answer."""

    async def echo(request: Received, exchange: Exchange) -> None:
        await respond(body=request.body)(request, exchange)

    server.default = echo
    bodies = [str(number).encode() for number in range(200)]
    fetched = await asyncio.gather(*(client.fetch(server.url, method="POST", body=body) for body in bodies))
    assert [response.body for response in fetched] == bodies
    assert server.connections <= PoolLimits().connections_per_server


async def test_an_exchange_leaves_nothing_behind(client: FederationClient, server: MisbehavingServer) -> None:
    """What was sent and what came back is freed at once, not by the next garbage collection, which may be far off."""
    gc.collect()
    gc.disable()
    try:
        before = _exchanges()
        assert (await client.fetch(server.url, method="POST", body=b"{}")).ok
        assert _exchanges() == before
    finally:
        gc.enable()


def _exchanges() -> int:
    # By its type: to ask an object of its class may run code of others (lazy objects of Django).
    return sum(issubclass(type(each), Request | ResponseReader) for each in gc.get_objects())
