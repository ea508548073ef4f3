"""The client over an injected transport: what goes out, what comes back, what is classified how."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import respx

from federation.http.client import FederationClient
from federation.http.connection import ResponseHeaders
from federation.http.errors import (
    BlockedUrl,
    BodyTooLarge,
    BrokenBody,
    MalformedResponse,
    NetworkError,
    ServerDisconnected,
    classify,
)
from federation.http.guard import AddressGuard
from federation.http.messages import Response
from federation.http.threat_policy import NetworkErrorCode as Code

URL = "https://b.example/api/auth/social/posts"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def router() -> respx.MockRouter:
    return respx.MockRouter(assert_all_called=False)


@pytest.fixture
async def client(router: respx.MockRouter) -> AsyncIterator[FederationClient]:
    transport = httpx.MockTransport(router.async_handler)
    async with FederationClient(AddressGuard(), transport) as open_client:
        yield open_client


@pytest.mark.parametrize("status", [200, 204, 301, 307, 400, 404, 409, 429, 500, 503])
async def test_every_status_is_a_response(client: FederationClient, router: respx.MockRouter, status: int) -> None:
    """Whatever the status, status, headers and body come back, and only 2xx is ok."""
    router.post(URL).respond(status, headers={"X-Thing": "1"}, content=b"body")
    response = await client.fetch(URL, method="POST", body=b"{}")
    assert (response.status, response.headers["x-thing"], response.body) == (status, "1", b"body")
    assert response.ok == (status < 300)


async def test_request_goes_out_as_given(client: FederationClient, router: respx.MockRouter) -> None:
    """Method, headers and body arrive as given, next to our own headers, and no cookie."""
    route = router.post(URL).respond(200)
    headers = {"Content-Type": "application/json", "X-Federation-Target": URL}
    await client.fetch(URL, method="POST", headers=headers, body=b'{"a":1}')
    sent = route.calls.last.request
    assert sent.content == b'{"a":1}'
    assert {name: sent.headers[name] for name in headers} == headers
    assert sent.headers["user-agent"] == "federation-delivery"
    assert sent.headers["accept-encoding"] == "identity"
    assert "cookie" not in sent.headers


async def test_blocked_url_sends_nothing(client: FederationClient, router: respx.MockRouter) -> None:
    """A refused URL reaches no transport."""
    route = router.route().respond(200)
    with pytest.raises(BlockedUrl):
        await client.fetch("http://169.254.169.254/latest/meta-data")
    assert not route.called


@pytest.mark.parametrize("length", ["1001", "9" * 30])
async def test_announced_length_over_the_cap(client: FederationClient, router: respx.MockRouter, length: str) -> None:
    """A Content-Length over the cap is enough to give up."""
    router.get(URL).respond(200, headers={"Content-Length": length}, content=b"short")
    with pytest.raises(BodyTooLarge):
        await client.fetch(URL, max_bytes=1000)


async def test_response_repr_hides_the_body() -> None:
    """A response in a log line shows no byte of its body."""
    assert "hidden" not in repr(Response(status=200, headers={}, body=b"hidden"))


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({}, None),
        ({"Retry-After": "30"}, 30),
        ({"retry-after": " 30 "}, 30),
        ({"X-Retry-After": "7"}, 7),
        ({"Retry-After": "5", "X-Retry-After": "7"}, 5),
        ({"Retry-After": "soon", "X-Retry-After": "7"}, 7),
        ({"Retry-After": "0"}, 1),
        ({"Retry-After": "86400"}, 86_400),
        ({"Retry-After": "9" * 5000}, 86_400),
        ({"Retry-After": "Fri, 02 Jan 2026 03:05:05 GMT"}, 60),
        ({"Retry-After": "Fri, 02 Jan 2026 03:05:05 -0000"}, 60),
        ({"Retry-After": "Fri, 02 Jan 2026 04:05:05 +0100"}, 60),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 1),
        ({"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}, 86_400),
        ({"Retry-After": "Fri, 31 Dec 9999 23:59:59 -1200"}, 86_400),
        ({"Retry-After": "60, 300"}, 300),
        ({"Retry-After": "300,60"}, 300),
        ({"Retry-After": "120, 120"}, 120),
        ({"Retry-After": "0, Thu, 01 Jan 1970 00:00:00 GMT"}, 1),
        ({"Retry-After": "30, Fri, 02 Jan 2026 03:05:05 GMT"}, 60),
        ({"Retry-After": "Fri, 02 Jan 2026 03:05:05 GMT, 90"}, 90),
        ({"Retry-After": "Friday, 02-Jan-26 03:05:05 GMT,Fri, 02 Jan 2026 03:06:05 GMT"}, 120),
        ({"Retry-After": "60, " + "9" * 40}, 86_400),
        ({"Retry-After": "soon, -5, 60, 1.5,,"}, 60),
        ({"Retry-After": "5, 6", "X-Retry-After": "7"}, 6),
        ({"Retry-After": "soon, later", "X-Retry-After": "7, 8"}, 8),
        ({"Retry-After": "-5, soon"}, None),
        ({"Retry-After": ", ".join(map(str, range(1, 51)))}, 50),
        ({"Retry-After": "1," * 30_000 + "2"}, 1),
        ({"Retry-After": "Fri," * 15_000}, None),
        ({"Retry-After": "Fri, 99 Jan 2026 03:05:05 GMT"}, None),
        ({"Retry-After": "Fri, 02 Jan 99999999999 03:05:05 GMT"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "1.5"}, None),
        ({"Retry-After": "1e9"}, None),
        ({"Retry-After": "٣"}, None),
        ({"Retry-After": ""}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "2026-01-02T03:05:05Z"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], pause: int | None) -> None:
    """Seconds and dates count, the longest of several, within one second and one day; junk does not."""
    response = Response(status=429, headers=httpx.Headers(headers, encoding="utf-8"), body=b"")
    assert response.retry_after(NOW) == (None if pause is None else timedelta(seconds=pause))


@pytest.mark.parametrize(
    ("location", "origin"),
    [
        (b"https://new.example/api/auth/social/posts?a=b#c", "https://new.example"),
        (b"HTTPS://New.Example:443", "https://new.example"),
        (b" \thttps://new.example/ ", "https://new.example"),
        (b"//new.example/posts", "https://new.example"),
        (b"http://b.example/", "http://b.example"),
        (b"https://b.example:8443/", "https://b.example:8443"),
        (b"https://xn--bcher-kva.example/", "https://xn--bcher-kva.example"),
        (b"https://[::1]:8443/x", "https://[::1]:8443"),
        (b"https://B.example:443/elsewhere", None),
        (b"/elsewhere", None),
        (b"elsewhere", None),
        (b"", None),
        (b"///new.example", None),
        (b"/\\new.example", None),
        (b"\\\\new.example", None),
        (b"https:new.example", None),
        (b"https:/new.example", None),
        (b"https://a.example/discover", None),
        (b"//a.example", None),
        (b"https://somebody@new.example/", None),
        (b"https://somebody:secret@new.example/", None),
        (b"https://b.example\\@new.example/", None),
        (b"javascript:alert(1)", None),
        (b"javascript://new.example/%0aalert(1)", None),
        (b"ftp://new.example/", None),
        (b"file:///etc/passwd", None),
        (b"https://new.example:0/", None),
        (b"https://new.example:x/", None),
        (b"https://new.exam\tple/", None),
        (b"https://new.example/\x1b[31m", None),
        (b"https://new.example/\x00", None),
        (b"https://new.example/\x7f", None),
        (b"https://new.example/a b", None),
        (b"https://$(reboot).example/", None),
        (b"https://`reboot`.example/", None),
        (b"https://<script>.example/", None),
        ("https://bücher.example/".encode(), None),
        ("https://bücher.example/".encode("latin-1"), None),
        ("https://new.example/\u202egnp.exe".encode(), None),
        (b"https://[::1", None),
        (b"https://[fe80::1%25eth0]/", None),
        (b"https://" + b"a" * 300, None),
        (b"https://new.example/" + b"a" * 64 * 1024, None),
        (b"//" * 32 * 1024, None),
    ],
)
def test_where_a_redirect_leads(location: bytes, origin: str | None) -> None:
    """The one spelling of another origin than the asked and our own, or nothing: strangers write it."""
    response = Response(status=308, headers=ResponseHeaders([(b"LOCATION", location)]), body=b"")
    assert response.moved_to(URL, ours="https://a.example") == origin


@pytest.mark.parametrize("status", [200, 201, 300, 304, 404, 503])
def test_only_redirects_lead_anywhere(status: int) -> None:
    """A `Location` means something else with other statuses, and without one there is nowhere to go."""
    elsewhere = ResponseHeaders([(b"Location", b"https://new.example/posts/1")])
    assert Response(status=status, headers=elsewhere, body=b"").moved_to(URL, ours=None) is None
    assert Response(status=308, headers={}, body=b"").moved_to(URL, ours=None) is None


def test_two_places_are_none() -> None:
    """Who names two is not believed either."""
    both = ResponseHeaders([(b"Location", b"https://new.example"), (b"Location", b"https://other.example")])
    assert Response(status=308, headers=both, body=b"").moved_to(URL, ours=None) is None


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "again"), Code.DNS_BLOCKED),
        (socket.gaierror(socket.EAI_NONAME, "no name"), Code.DNS_BLOCKED),
        (ConnectionRefusedError(), Code.CONN_REFUSED),
        (OSError(errno.ECONNREFUSED, "Multiple exceptions: refused, refused"), Code.CONN_REFUSED),
        (ConnectionResetError(), Code.CONN_RESET),
        (BrokenPipeError(), Code.CONN_RESET),
        (TimeoutError(errno.ETIMEDOUT, "kernel"), Code.CONN_RESET),
        (TimeoutError(), Code.TIMEOUT),
        (httpx.ConnectTimeout("connect"), Code.TIMEOUT),
        (httpx.ReadTimeout("read"), Code.TIMEOUT),
        (httpx.PoolTimeout("pool"), Code.TIMEOUT),
        (ssl.SSLError(1, "wrong version"), Code.TLS_ERROR),
        (ssl.SSLCertVerificationError(1, "issuer"), Code.TLS_ERROR),
        (ServerDisconnected(), Code.UNKNOWN),
        (httpx.ReadError("x"), Code.UNKNOWN),
        (httpx.RemoteProtocolError("x"), Code.UNKNOWN),
        (BrokenBody(), Code.CONN_RESET),
        (MalformedResponse(), Code.UNKNOWN),
        (OSError(errno.EHOSTUNREACH, "no route"), Code.UNKNOWN),
        (OSError(errno.ENETUNREACH, "unreachable"), Code.UNKNOWN),
    ],
    ids=repr,
)
async def test_classification(client: FederationClient, router: respx.MockRouter, exc: Exception, code: Code) -> None:
    """Each failure of the transport becomes a NetworkError with its code, judged by type and errno."""
    router.get(URL).mock(side_effect=exc)
    with pytest.raises(NetworkError) as caught:
        await client.fetch(URL)
    assert caught.value.code is code
    assert caught.value.__cause__ is exc


def _raised_from(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (_raised_from(httpx.ConnectError("x"), ConnectionRefusedError()), Code.CONN_REFUSED),
        (_raised_from(httpx.ConnectError("x"), socket.gaierror(-2, "x")), Code.DNS_BLOCKED),
    ],
    ids=["refused", "dns"],
)
def test_cause_decides(exc: Exception, code: Code) -> None:
    """What stands behind the HTTP library's exception decides, not the name the library gave it."""
    assert classify(exc) is code


def test_error_being_handled_does_not_colour_the_next() -> None:
    """What happened to be in flight when an error was raised plays no part in its code."""
    disconnected = ServerDisconnected()
    disconnected.__context__ = socket.gaierror(socket.EAI_NONAME, "no name")
    assert classify(disconnected) is Code.UNKNOWN


async def test_bug_is_not_a_network_error(client: FederationClient, router: respx.MockRouter) -> None:
    """An exception that no network or peer causes passes unchanged."""
    router.get(URL).mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        await client.fetch(URL)
