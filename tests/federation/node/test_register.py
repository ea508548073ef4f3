"""`REGISTER`: believed only as far as the server's own `/discover`, asked over real HTTP, says the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network

import httpx
import pytest

from federation.http.client import FederationClient, FederationFetch
from federation.node.callback import (
    CALLBACK_TIMEOUT,
    MAX_CALLBACKS,
    MAX_CALLBACKS_PER_HOST,
    MAX_CALLBACKS_PER_SERVER,
    Callback,
)
from federation.node.limits import NEW_SERVERS_PER_NETWORK, MemoryWindows
from federation.node.refusals import Refusal
from federation.protocol.discovery import DiscoverDocument
from federation.protocol.encodings import dump_json, validate
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.node.conftest import LOOPBACK, Node, serving
from tests.federation.node.remote_server import RemoteServer
from tests.misbehaving import Behaviour, Exchange, MisbehavingServer, Received, huge_body, redirect, reset, respond
from tests.patience import until
from workers.clock import monotonic

PROXIES = [ip_network("10.0.0.0/8")]


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as running:
        yield running


@pytest.fixture
def remote(server: MisbehavingServer) -> RemoteServer:
    """A peer on loopback that shows its keys, as long as `server` is not told otherwise."""
    peer = RemoteServer(url=server.url, keys=generate_own_keys())
    server.routes["/discover"] = respond(body=peer.document())
    return peer


async def test_a_server_that_shows_its_keys_is_registered(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """It is asked for its keys and to prove them, once each, stored healthy, and told who we are."""
    response = await node.discover(remote.register())

    assert response.status_code == 200, response.text
    echo = validate(DiscoverDocument, response.json()["echo"])
    assert (echo.url, echo.public_key) == ("https://b.example", node.keys.signing.public_text)
    known = await node.registry.find(remote.url)
    assert known is not None
    assert known.is_healthy
    assert known.public_key == remote.keys.signing.public_text
    assert known.encryption_public_key == remote.keys.encryption.public_text
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/discover"), ("POST", "/proxy")]


async def test_registering_again_is_no_error(node: Node, remote: RemoteServer) -> None:
    """Every node does so whenever it discovers us anew."""
    answers = await asyncio.gather(*(node.discover(remote.register()) for _ in range(4)))

    assert [answer.status_code for answer in answers] == [200] * 4


async def test_the_url_is_stored_in_canonical_form(node: Node, remote: RemoteServer, server: MisbehavingServer) -> None:
    """A trailing slash or another spelling of the host does not make another server, nor another path to ask."""
    response = await node.discover(remote.register(url=f"HTTP://0x7f000001:{server.port}/some/path/"))

    assert response.status_code == 200, response.text
    assert await node.registry.find(remote.url) is not None
    assert [request.path for request in server.requests] == ["/discover", "/proxy"]


async def test_a_verified_registration_heals_a_sick_server(node: Node, remote: RemoteServer) -> None:
    """A server that was unreachable and now answers our callback is well."""
    await node.know(remote)
    await node.registry.mark_unhealthy(remote.url, "DNS_BLOCKED")

    assert (await node.discover(remote.register())).status_code == 200

    known = await node.registry.find(remote.url)
    assert known is not None
    assert known.is_healthy


@pytest.mark.parametrize("member", ["publicKey", "encryptionPublicKey"])
async def test_keys_the_server_does_not_show_are_refused(node: Node, remote: RemoteServer, member: str) -> None:
    """Nobody registers keys in another server's name."""
    forged = generate_own_keys().signing.public_text

    response = await node.discover(remote.register(**{member: forged}))

    assert response.status_code == 400
    assert "Public keys do not match" in response.json()["error"]
    assert await node.registry.find(remote.url) is None


async def test_a_changed_signing_key_needs_the_rotation_flow(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """Whoever takes over a server's address does not take over its name."""
    await node.know(remote)
    changed = RemoteServer(url=remote.url, keys=generate_own_keys())
    server.routes["/discover"] = respond(body=changed.document())

    response = await node.discover(changed.register())

    assert response.status_code == 400
    assert "key rotation flow" in response.json()["error"]
    known = await node.registry.find(remote.url)
    assert known is not None
    assert known.public_key == remote.keys.signing.public_text


async def test_keys_of_another_registered_server_are_a_conflict(
    node: Node, peer: RemoteServer, server: MisbehavingServer
) -> None:
    """A key names one server."""
    thief = RemoteServer(url=server.url, keys=peer.keys)
    server.routes["/discover"] = respond(body=thief.document())

    response = await node.discover(thief.register())

    assert response.status_code == 409
    assert await node.registry.find(server.url) is None


def close() -> Behaviour:
    async def behave(request: Received, exchange: Exchange) -> None:
        exchange.close()

    return behave


@pytest.mark.parametrize(("behaviour", "code"), [(reset(), "CONN_RESET"), (close(), "UNKNOWN")])
async def test_a_server_that_does_not_answer_is_a_bad_gateway(
    node: Node, remote: RemoteServer, server: MisbehavingServer, behaviour: Behaviour, code: str
) -> None:
    """502 with the network error's code."""
    server.routes["/discover"] = behaviour

    response = await node.discover(remote.register())

    assert (response.status_code, response.json()["code"]) == (502, code)
    assert await node.registry.find(remote.url) is None


async def test_a_known_server_that_does_not_answer_is_marked_unhealthy(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """502 CONN_REFUSED, and a probe is planned."""
    await node.know(remote)
    await server.stop()

    response = await node.discover(remote.register())

    assert (response.status_code, response.json()["code"]) == (502, "CONN_REFUSED")
    known = await node.registry.find(remote.url)
    assert known is not None
    assert known.unhealthy_reason == "CONN_REFUSED"
    assert node.probes == [(remote.url, 0)]


@pytest.mark.parametrize("behaviour", [respond(body=b"<html>"), respond(body=b""), huge_body(), huge_body(True)])
async def test_an_answer_that_is_not_json_is_a_bad_gateway_without_a_code(
    node: Node, remote: RemoteServer, server: MisbehavingServer, behaviour: Behaviour
) -> None:
    """502, and nothing to classify."""
    server.routes["/discover"] = behaviour

    response = await node.discover(remote.register())

    assert response.status_code == 502
    assert set(response.json()) == {"error"}


async def test_a_redirect_is_not_followed(node: Node, remote: RemoteServer, server: MisbehavingServer) -> None:
    """Wherever it leads."""
    server.routes["/discover"] = redirect(f"{server.url}/elsewhere")
    server.routes["/elsewhere"] = respond(body=remote.document())

    assert (await node.discover(remote.register())).status_code == 502
    assert server.hits == 1


async def test_the_status_of_the_answer_does_not_matter(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """Peers do not look at it either."""
    server.routes["/discover"] = respond(503, body=remote.document())

    assert (await node.discover(remote.register())).status_code == 200


@pytest.mark.parametrize(
    "change",
    [{"publicKey": None}, {"encryptionPublicKey": "AAAA"}, {"url": "https://elsewhere.example"}, {"url": "nonsense"}],
)
async def test_a_document_that_does_not_identify_the_server_makes_it_invalid(
    node: Node, remote: RemoteServer, server: MisbehavingServer, change: dict[str, object]
) -> None:
    """Keys missing or short, or another server's name: 400 Invalid server."""
    server.routes["/discover"] = respond(body=dump_json({**remote.identity(), **change}).encode())

    response = await node.discover(remote.register())

    assert response.status_code == 400
    assert response.json()["error"].startswith("Invalid server")
    assert await node.registry.find(remote.url) is None


@pytest.mark.parametrize(
    "change",
    [
        {"url": 5},
        {"publicKey": "AAAA"},
        {"publicKey": "A" * 43 + "!"},
        {"encryptionPublicKey": None},
        {"encryptionPublicKey": generate_own_keys().signing.public_text + "AAAA"},
    ],
)
async def test_a_registration_of_the_wrong_shape_is_refused_unasked(
    node: Node, remote: RemoteServer, server: MisbehavingServer, change: dict[str, object]
) -> None:
    """400 with a list of issues as text; the server is not even asked."""
    response = await node.discover(remote.register(**change))

    assert response.status_code == 400
    [issue] = json.loads(response.json()["error"])
    assert issue["message"]
    assert server.hits == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:1",
        "http://10.0.0.1",
        "http://169.254.169.254",
        "http://[::1]",
        "http://[::ffff:10.0.0.1]",
        "ftp://c.example",
        "https://user:secret@c.example",
        "//c.example",
        "nonsense",
        "https://b.example",
    ],
)
async def test_a_url_that_may_not_be_asked_is_refused(node: Node, other: RemoteServer, url: str) -> None:
    """400 for private addresses, other schemes, user information, nonsense, and our own name."""
    response = await node.discover(other.register(url=url))

    assert response.status_code == 400
    assert response.json()["error"].startswith("url: ")
    assert "secret" not in response.text
    assert "DEV_ALLOWED_HOSTNAMES" not in response.text


async def test_the_answer_does_not_tell_what_names_resolve_to(node: Node, other: RemoteServer) -> None:
    """`localhost` resolves to a private address: 502 with a code, but no address."""
    response = await node.discover(other.register(url="http://localhost:1"))

    assert (response.status_code, response.json()["code"]) == (502, "DNS_BLOCKED")
    assert "127.0.0.1" not in response.text
    assert "::1" not in response.text


async def test_registrations_of_a_server_that_hangs_hold_up_no_other(
    node: Node, remote: RemoteServer, server: MisbehavingServer, database_url: str
) -> None:
    """However many: a few wait, those beyond are told to come back, and the next server is registered at once."""
    async with serving(database_url, proxies=PROXIES, client_address="10.0.0.1") as visited:
        await _registrations_that_hang(visited, remote, server)


async def _registrations_that_hang(node: Node, remote: RemoteServer, server: MisbehavingServer) -> None:
    released = asyncio.Event()
    answer = respond(body=remote.document())

    async def wait(request: Received, exchange: Exchange) -> None:
        await released.wait()
        await answer(request, exchange)

    server.routes["/discover"] = wait
    clients = [f"192.0.{number}.1" for number in range(MAX_CALLBACKS)]
    tasks = [asyncio.create_task(_register(node, remote, client)) for client in clients]
    await until(lambda: len(server.requests) == MAX_CALLBACKS_PER_SERVER)
    async with MisbehavingServer() as well:
        another = RemoteServer(url=well.url, keys=generate_own_keys())
        well.routes["/discover"] = respond(body=another.document())
        registered = await _register(node, another, "192.0.200.1")
    released.set()
    answers = await asyncio.gather(*tasks)

    assert registered.status_code == 200, registered.text
    refused = [each for each in answers if each.status_code == 503]
    assert len(refused) == MAX_CALLBACKS - MAX_CALLBACKS_PER_SERVER
    assert {each.headers["Retry-After"] for each in refused} == {"5"}
    assert [each.status_code for each in answers].count(200) == MAX_CALLBACKS_PER_SERVER


async def test_a_network_has_a_hundred_new_servers_an_hour(
    node: Node, remote: RemoteServer, server: MisbehavingServer, database_url: str
) -> None:
    """Counted before one is asked: the known may introduce themselves again, and other networks theirs."""
    windows = MemoryWindows()
    for number in range(NEW_SERVERS_PER_NETWORK.requests):
        assert await windows.allows("register:2001:db8:7::/48", NEW_SERVERS_PER_NETWORK), number
    async with serving(database_url, windows=windows, proxies=PROXIES, client_address="10.0.0.1") as visited:
        refused = await _register(visited, remote, "2001:db8:7:1::1")
        taken = await _register(visited, remote, "2001:db8:8::1")
        again = await _register(visited, remote, "2001:db8:7:2::1")

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3600")
    assert (taken.status_code, again.status_code) == (200, 200)


async def _register(node: Node, remote: RemoteServer, client: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", "X-Forwarded-For": client}
    return await node.send("/discover", remote.register(), headers)


async def test_hosts_have_so_many_places_and_all_together_more(federation: Federation) -> None:
    """One that hangs keeps no place from others; a place that was left is free."""
    callback = Callback(federation.fetch)
    async with AsyncExitStack() as places:
        for port in range(MAX_CALLBACKS_PER_HOST):
            await places.enter_async_context(callback.place(f"https://hanging.example:{port + 1}", ()))
        with pytest.raises(Refusal):
            await places.enter_async_context(callback.place("https://hanging.example", ()))
        for number in range(MAX_CALLBACKS - MAX_CALLBACKS_PER_HOST):
            await places.enter_async_context(callback.place(f"https://{number}.example", ()))
        with pytest.raises(Refusal):
            await places.enter_async_context(callback.place("https://last.example", ()))
    async with callback.place("https://hanging.example", ()):
        pass


async def test_a_server_takes_no_place_of_the_client_that_has_its_address(federation: Federation) -> None:
    """Anybody may name any address."""
    callback, holders = Callback(federation.fetch), ("203.0.113.5", "203.0.113.0/24")
    async with (
        callback.place("https://203.0.113.5:81", ("198.51.100.9",)),
        callback.place("https://b.example", holders),
    ):
        pass


@asynccontextmanager
async def asking(marked: list[str]) -> AsyncIterator[Callback]:
    """One that may ask loopback, and adds to the list whom it takes for sick."""

    async def mark(url: str, _code: str) -> None:
        marked.append(url)

    async with FederationClient(LOOPBACK) as client:
        yield Callback(FederationFetch(client, mark_unhealthy=mark))


async def test_the_wait_for_a_place_is_part_of_the_time() -> None:
    """Who registers waits ten seconds for all of it."""
    ends: list[float] = []

    async def ask(callback: Callback) -> None:
        async with callback.place("https://b.example", ("192.0.2.1",)) as end:
            ends.append(end)

    async with (
        asking([]) as callback,
        asyncio.TaskGroup() as asked,
        callback.place("https://a.example", ("192.0.2.1",)),
    ):
        asked.create_task(ask(callback))
        await asyncio.sleep(0)
        left = monotonic()
    assert len(ends) == 1
    assert ends[0] <= left + CALLBACK_TIMEOUT.total_seconds()


async def test_a_server_that_had_no_time_to_answer_is_not_taken_for_sick(
    remote: RemoteServer, server: MisbehavingServer
) -> None:
    """Whoever asked spent it; one that fails with all its time is."""
    marked: list[str] = []
    async with asking(marked) as callback:
        with pytest.raises(Refusal):
            await callback.document(remote.url, end=monotonic())
        assert marked == []
        assert await callback(remote.url, ()) == remote.document()
        server.routes["/discover"] = reset()
        with pytest.raises(Refusal):
            await callback(remote.url, ())
        assert marked == [remote.url]
