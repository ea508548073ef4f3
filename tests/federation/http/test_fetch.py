"""`federation_fetch`: what is recorded about a failed server, and when a relay is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest
import respx
from structlog.testing import capture_logs

from federation.http.client import FederationClient, FederationFetch, Fetched, OutboundRequest
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError, RelayFailed
from federation.http.guard import AddressGuard
from federation.http.messages import Response
from federation.http.threat_policy import NetworkErrorCode as Code
from federation.http.threat_policy import PolicyOverride

URL = "https://b.example/api/auth/social/posts"
REFUSED = ConnectionRefusedError()
DISCONNECTED = httpx.RemoteProtocolError("closed")
RELAYED = Fetched(response=Response(status=200, headers={}, body=b"{}"), peer="https://r.example")


class Records:
    """Remembers what was marked; fails if told to."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, Code]] = []
        self.failure: Exception | None = None

    async def mark_unhealthy(self, server_url: str, code: Code) -> None:
        self.marked.append((server_url, code))
        if self.failure is not None:
            raise self.failure


class ScriptedRelay:
    """Answers with its result, or raises it."""

    def __init__(self, result: Fetched | Exception = RELAYED) -> None:
        self.result = result
        self.asked: list[tuple[OutboundRequest, timedelta]] = []

    async def __call__(self, request: OutboundRequest, remaining: timedelta) -> Fetched:
        self.asked.append((request, remaining))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def router() -> respx.MockRouter:
    return respx.MockRouter()


@pytest.fixture
async def client(router: respx.MockRouter) -> AsyncIterator[FederationClient]:
    async with FederationClient(AddressGuard(), httpx.MockTransport(router.async_handler)) as open_client:
        yield open_client


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def relay() -> ScriptedRelay:
    return ScriptedRelay()


@pytest.fixture
def fetch(client: FederationClient, records: Records, relay: ScriptedRelay) -> FederationFetch:
    return FederationFetch(client, mark_unhealthy=records.mark_unhealthy, relay=relay)


@pytest.mark.parametrize("status", [200, 404, 500, 503])
async def test_any_response_is_success(
    fetch: FederationFetch, router: respx.MockRouter, records: Records, relay: ScriptedRelay, status: int
) -> None:
    """A response of any status is returned as direct, and neither registry nor relay is touched."""
    router.get(URL).respond(status)
    fetched = await fetch(URL, proxy_fallback=True)
    assert (fetched.response.status, fetched.proxied, fetched.peer) == (status, False, None)
    assert (records.marked, relay.asked) == ([], [])


async def test_network_error_marks_the_origin(
    fetch: FederationFetch, router: respx.MockRouter, records: Records
) -> None:
    """A network failure marks the origin of the URL unhealthy with its code, and is raised."""
    router.get(URL).mock(side_effect=REFUSED)
    with pytest.raises(NetworkError):
        await fetch(URL)
    assert records.marked == [("https://b.example", Code.CONN_REFUSED)]


async def test_server_url_names_what_is_marked(
    fetch: FederationFetch, router: respx.MockRouter, records: Records
) -> None:
    """The server's registered URL, if given, is the one marked."""
    router.get(URL).mock(side_effect=REFUSED)
    with pytest.raises(NetworkError):
        await fetch(URL, server_url="https://registered.example")
    assert records.marked == [("https://registered.example", Code.CONN_REFUSED)]


async def test_health_update_can_be_skipped(fetch: FederationFetch, router: respx.MockRouter, records: Records) -> None:
    """With `skip_health_update` the failure is raised and nothing marked."""
    router.get(URL).mock(side_effect=REFUSED)
    with pytest.raises(NetworkError):
        await fetch(URL, skip_health_update=True)
    assert records.marked == []


async def test_failure_to_mark_is_only_logged(
    fetch: FederationFetch, router: respx.MockRouter, records: Records
) -> None:
    """A registry in trouble does not hide the network error."""
    router.get(URL).mock(side_effect=REFUSED)
    records.failure = RuntimeError("database is down")
    with capture_logs() as logs, pytest.raises(NetworkError) as caught:
        await fetch(URL)
    assert caught.value.code is Code.CONN_REFUSED
    assert [entry["event"] for entry in logs] == ["server_mark_unhealthy_failed"]


@pytest.mark.parametrize(("url", "error"), [("http://10.0.0.1/", BlockedUrl), ("https://b.example/huge", BodyTooLarge)])
async def test_permanent_errors_leave_health_alone(
    fetch: FederationFetch,
    router: respx.MockRouter,
    records: Records,
    relay: ScriptedRelay,
    url: str,
    error: type[Exception],
) -> None:
    """A blocked URL and an over-long body are no sickness of the server, and no case for a relay."""
    router.get("https://b.example/huge").respond(200, content=b"x" * (1024 * 1024 + 1))
    if error is BlockedUrl:
        router.clear()
    with pytest.raises(error):
        await fetch(url, proxy_fallback=True)
    assert (records.marked, relay.asked) == ([], [])


async def test_relay_answers_for_the_server(
    fetch: FederationFetch, router: respx.MockRouter, records: Records, relay: ScriptedRelay
) -> None:
    """After a relay-eligible failure the relay gets the request and the time left; its answer is the response."""
    router.post(URL).mock(side_effect=DISCONNECTED)
    fetched = await fetch(
        URL,
        method="POST",
        headers={"Origin": "https://a.example"},
        body=b"{}",
        timeout=timedelta(seconds=15),
        proxy_fallback=True,
    )
    assert (fetched.proxied, fetched.peer) == (True, "https://r.example")
    assert records.marked == [("https://b.example", Code.UNKNOWN)]
    [(request, remaining)] = relay.asked
    assert "{}" not in repr(request)
    assert request == OutboundRequest(
        url=URL, server_url="https://b.example", method="POST", headers={"Origin": "https://a.example"}, body=b"{}"
    )
    assert timedelta(seconds=5) < remaining <= timedelta(seconds=15)


@pytest.mark.parametrize(("failure", "fallback"), [(REFUSED, True), (DISCONNECTED, False)])
async def test_relay_is_asked_only_if_wanted_and_allowed(
    fetch: FederationFetch, router: respx.MockRouter, relay: ScriptedRelay, failure: Exception, fallback: bool
) -> None:
    """Neither a code without relays nor a caller without fallback reaches the relay."""
    router.get(URL).mock(side_effect=failure)
    with pytest.raises(NetworkError):
        await fetch(URL, proxy_fallback=fallback)
    assert relay.asked == []


async def test_override_allows_a_relay(
    client: FederationClient, router: respx.MockRouter, records: Records, relay: ScriptedRelay
) -> None:
    """An administrator's flag opens the relay for a code that has none by default."""
    router.get(URL).mock(side_effect=REFUSED)
    overrides = {Code.CONN_REFUSED: PolicyOverride(relay_eligible=True)}
    fetch = FederationFetch(client, mark_unhealthy=records.mark_unhealthy, relay=relay, policy_overrides=overrides)
    assert (await fetch(URL, proxy_fallback=True)).proxied


async def test_failed_relay_leaves_the_direct_error(
    fetch: FederationFetch, router: respx.MockRouter, relay: ScriptedRelay
) -> None:
    """If the relay fails too, the direct failure's code is raised, with that failure as the cause and both texts."""
    router.post(URL).mock(side_effect=DISCONNECTED)
    relay.result = RelayFailed("no peer is healthy")
    with capture_logs() as logs, pytest.raises(NetworkError, match="no peer is healthy") as caught:
        await fetch(URL, method="POST", proxy_fallback=True)
    assert (caught.value.code, caught.value.origin) == (Code.UNKNOWN, "https://b.example")
    direct = caught.value.__cause__
    assert isinstance(direct, NetworkError)
    assert direct.__cause__ is DISCONNECTED
    assert str(caught.value) == f"{direct}; relay: no peer is healthy"
    assert [entry["event"] for entry in logs] == ["relay_failed"]


async def test_trouble_of_our_own_with_the_relay_leaves_the_direct_error(
    fetch: FederationFetch, router: respx.MockRouter, relay: ScriptedRelay
) -> None:
    """A database that cannot name a peer is logged by its type, and the direct error itself is raised."""
    router.post(URL).mock(side_effect=DISCONNECTED)
    relay.result = RuntimeError("password=s3cret")
    with capture_logs() as logs, pytest.raises(NetworkError) as caught:
        await fetch(URL, method="POST", proxy_fallback=True)
    assert caught.value.__cause__ is DISCONNECTED
    assert [(entry["event"], entry["error"]) for entry in logs] == [("relay_failed", "RuntimeError")]
    assert "s3cret" not in repr(logs)


async def test_without_a_relay_the_direct_error_is_raised(
    client: FederationClient, router: respx.MockRouter, records: Records
) -> None:
    """A node that has no relay raises the network error even where one would be allowed."""
    router.get(URL).mock(side_effect=DISCONNECTED)
    fetch = FederationFetch(client, mark_unhealthy=records.mark_unhealthy)
    with pytest.raises(NetworkError):
        await fetch(URL, proxy_fallback=True)
    assert records.marked == [("https://b.example", Code.UNKNOWN)]
