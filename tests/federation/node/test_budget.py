"""Whoever asks this node for something can make it send few requests, as many as `SECURITY.md` says, counted there."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import httpx
import pytest

from db import RemoteActorKey
from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.keys import public_pem
from federation.activitypub.signatures import SignatureKind, SigningKey, sign
from federation.node.admission import DISCOVER_PER_CLIENT
from federation.node.app import FOLLOWS_PATH
from federation.node.limits import (
    NEW_SERVERS,
    NEW_SERVERS_PER_CLIENT,
    NEW_SERVERS_PER_NETWORK,
    Limit,
    MemoryWindows,
)
from federation.protocol.encodings import dump_json
from federation.protocol.keys import generate_own_keys
from tests.federation.activitypub.remote import loaded, private_key, shows
from tests.federation.node.conftest import OWN_URL, Node, serving
from tests.federation.node.remote_server import RemoteServer
from tests.federation.node.test_key_check import encode, question
from tests.federation.node.test_rotation import begin
from tests.misbehaving import MisbehavingServer, redirect, respond
from workers.clock import SystemClock

PAGE = (Path(__file__).parents[3] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = {request: int(ours) for request, ours in re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE, re.MULTILINE)}
"""The requests of the table, and how many of ours each may cause."""
CLIENT = "192.0.2.1"


@pytest.fixture
async def sink() -> AsyncIterator[MisbehavingServer]:
    """A server that counts what it is sent, and shows the keys of `named`. To everything else it answers `{}`."""
    async with MisbehavingServer() as running:
        yield running


@pytest.fixture
def named(sink: MisbehavingServer) -> RemoteServer:
    """What the requests name; registered nowhere."""
    named = RemoteServer(url=sink.url, keys=generate_own_keys())
    sink.routes["/discover"] = respond(body=named.document())
    owner = f"{sink.url}/at/bob"
    key = {"id": f"{sink.url}/key", "owner": owner, "publicKeyPem": public_pem(private_key())}
    sink.routes["/key"], sink.routes["/at/bob"] = redirect("/at/key", 302), redirect("/at/bob2", 302)
    sink.routes["/at/key"] = shows(key)
    sink.routes["/at/bob2"] = shows({"id": f"{owner}2", "publicKey": {**key, "owner": f"{owner}2"}})
    return named


def proxied(sender: RemoteServer, target: RemoteServer) -> bytes:
    """A follow of the target's user, for a relay."""
    follow = sender.delivery(sender.follow(), "FEDERATE", target.keys)
    return sender.proxied(sender.relayed(target.url + FOLLOWS_PATH, follow), target.url, target.keys)


Ask = Callable[[Node, RemoteServer, RemoteServer], Awaitable[httpx.Response]]
"""Sends one request to the node. The peer is registered there; the other server is what the request names."""


async def register(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    return await node.discover(named.register())


async def register_known(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    await node.know(named)
    return await node.discover(named.register())


async def check_keys(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    await node.know(named)
    return await node.discover(encode(question(named, node.keys)))


async def relay(node: Node, peer: RemoteServer, named: RemoteServer) -> httpx.Response:
    return await node.proxy(proxied(peer, named), bearer=peer.url)


async def relay_to_known(node: Node, peer: RemoteServer, named: RemoteServer) -> httpx.Response:
    await node.know(named)
    return await node.proxy(proxied(peer, named), bearer=peer.url)


async def targeted(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    relayed = named.relayed("https://b.example" + FOLLOWS_PATH, named.delivery(named.follow(), "FEDERATE", node.keys))
    return await node.proxy(named.targeted(relayed, node.keys), bearer=named.url)


async def follow(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    return await node.follow(named)


async def rotate(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    return await begin(node, named, generate_own_keys())


async def send_activity(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    """By a key whose document and whose owner's are elsewhere on their server, as `sink` has it."""
    body = dump_json({"type": "Create", "actor": f"{named.url}/at/bob2", "id": f"{named.url}/1"}).encode()
    return await posted(node, f"{named.url}/key", body)


async def send_activity_by_known(node: Node, peer: RemoteServer, named: RemoteServer) -> httpx.Response:
    now = SystemClock().now()
    await node.add(
        RemoteActorKey(key_id=f"{named.url}/eve", owner=named.url, public_pem=public_pem(private_key()), fetched_at=now)
    )
    await posted(node, f"{named.url}/eve", dump_json({"type": "Create", "actor": named.url + "/eve"}).encode())
    return await send_activity(node, peer, named)


async def end_unknown(node: Node, _: RemoteServer, named: RemoteServer) -> httpx.Response:
    actor = f"{named.url}/bob"
    return await posted(
        node, f"{named.url}/key", dump_json({"type": "Delete", "actor": actor, "object": actor}).encode()
    )


async def posted(node: Node, key_id: str, body: bytes) -> httpx.Response:
    headers = sign(
        SignatureKind.CAVAGE,
        method="POST",
        url=OWN_URL + "/inbox",
        body=body,
        content_type=ACTIVITY_JSON,
        at=SystemClock().now(),
        key=SigningKey(key_id, loaded(private_key())),
    )
    return await node.send("/inbox", body, headers)


ASKED: dict[str, tuple[Ask, int]] = {
    "`REGISTER` of an unknown server": (register, 200),
    "`REGISTER` of a registered server": (register_known, 200),
    "`DISCOVER`": (check_keys, 200),
    "`PROXY` to an unknown server": (relay, 200),
    "`PROXY` to a registered server": (relay_to_known, 200),
    "`TARGETED`": (targeted, 403),
    "A follow or a post": (follow, 403),
    "An activity by a key of a server of which we have none": (send_activity, 202),
    "An activity by an unknown key of another server": (send_activity_by_known, 202),
    "The news that an unknown actor is no more": (end_unknown, 202),
    "A rotation": (rotate, 404),
}
"""What the table is about, and the answer that shows how far it got."""


def test_each_request_of_the_table_is_counted() -> None:
    """And no other is."""
    assert ROWS.keys() == ASKED.keys()


@pytest.mark.parametrize("request_", ASKED)
async def test_a_request_causes_no_more_of_ours_than_the_page_says(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, named: RemoteServer, request_: str
) -> None:
    """Counted at the server that it names, which nobody vouched for."""
    ask, status = ASKED[request_]

    response = await ask(node, peer, named)

    assert response.status_code == status, response.text
    assert sink.hits == ROWS[request_], [(each.method, each.path) for each in sink.requests]


async def test_a_relay_discovers_without_a_ping(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, named: RemoteServer
) -> None:
    """What the wire's discovery consists of, and the relayed request."""
    await relay(node, peer, named)

    assert [(each.method, each.path) for each in sink.requests] == [
        ("GET", "/discover"),
        ("POST", "/discover"),
        ("POST", "/proxy"),
    ]


async def test_a_host_that_shows_no_document_is_asked_once(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, named: RemoteServer
) -> None:
    """Whoever is named without being such a server hears no more of us."""
    sink.routes["/discover"] = respond(body=b"it works")

    assert (await relay(node, peer, named)).status_code == 502
    assert sink.hits == 1


async def test_a_relay_takes_nobody_elses_key(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, named: RemoteServer
) -> None:
    """Nor is the owner asked for it: that is for those who register themselves."""
    sink.routes["/discover"] = respond(body=RemoteServer(url=named.url, keys=peer.keys).document())

    assert (await relay(node, peer, named)).status_code == 502
    assert sink.hits == 1
    assert await node.registry.find(named.url) is None


@pytest.mark.parametrize("ask", [register, relay, send_activity])
@pytest.mark.parametrize(
    ("subject", "limit"),
    [(CLIENT, NEW_SERVERS_PER_CLIENT), ("192.0.2.0/24", NEW_SERVERS_PER_NETWORK), ("all", NEW_SERVERS)],
    ids=["client", "network", "all"],
)
async def test_one_budget_holds_for_everything_that_makes_us_meet_servers(
    node: Node,
    peer: RemoteServer,
    sink: MisbehavingServer,
    named: RemoteServer,
    database_url: str,
    ask: Ask,
    subject: str,
    limit: Limit,
) -> None:
    """Who has spent it is told to come back, and nobody is asked; what is known already does not count."""
    windows = MemoryWindows()
    for _ in range(limit.requests):
        assert await windows.allows(f"register:{subject}", limit)
    proxies = [ip_network("10.0.0.0/8")]
    async with serving(database_url, windows=windows, proxies=proxies, client_address="10.0.0.1") as visited:
        visited.client.headers["X-Forwarded-For"] = CLIENT
        refused = await ask(visited, peer, named)
        hits = sink.hits
        taken = await relay_to_known(visited, peer, named)

    assert (refused.status_code, refused.headers["Retry-After"], hits) == (429, "3600", 0)
    assert taken.status_code == 200


async def test_registrations_and_relays_spend_the_same(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, database_url: str
) -> None:
    """A client introduces ten servers an hour, by whatever means, and then none; another has its own ten."""
    unknown = RemoteServer(url=sink.url, keys=generate_own_keys())
    sink.routes["/discover"] = respond(body=b"{}")  # so that the server stays unknown
    proxies = [ip_network("10.0.0.0/8")]
    async with serving(database_url, proxies=proxies, client_address="10.0.0.1") as visited:
        visited.client.headers["X-Forwarded-For"] = CLIENT
        answers = [
            (await ask(visited, peer, unknown)).status_code
            for _ in range(NEW_SERVERS_PER_CLIENT.requests // 2)
            for ask in (register, relay)
        ]
        over = [(await relay(visited, peer, unknown)).status_code for _ in range(3)]
        hits = sink.hits
        visited.client.headers["X-Forwarded-For"] = "192.0.2.2"
        another = await relay(visited, peer, unknown)

    assert 429 not in answers
    assert over == [429] * 3
    assert hits == NEW_SERVERS_PER_CLIENT.requests
    assert another.status_code == 502


async def test_questions_and_new_servers_are_two_budgets(
    node: Node, peer: RemoteServer, sink: MisbehavingServer, named: RemoteServer, database_url: str
) -> None:
    """Whose questions about registered servers are spent has all its new servers left, and no more than these."""
    proxies = [ip_network("10.0.0.0/8")]
    async with (
        MisbehavingServer() as stranger,
        serving(database_url, proxies=proxies, client_address="10.0.0.1") as visited,
    ):
        visited.client.headers["X-Forwarded-For"] = CLIENT
        unknown = RemoteServer(url=stranger.url, keys=generate_own_keys())  # for good: it shows no document
        asked = [
            (await register_known(visited, peer, named)).status_code for _ in range(1 + DISCOVER_PER_CLIENT.requests)
        ]
        met = [(await relay(visited, peer, unknown)).status_code for _ in range(1 + NEW_SERVERS_PER_CLIENT.requests)]

        assert asked == [*[200] * 10, 429]
        assert met == [*[502] * 10, 429]
        assert (sink.hits, stranger.hits) == (10 * ROWS["`REGISTER` of a registered server"], 10)


def test_the_page_names_the_two_budgets() -> None:
    """With the limits that they have."""
    text = " ".join(PAGE.split())
    limits = NEW_SERVERS_PER_CLIENT, NEW_SERVERS_PER_NETWORK, NEW_SERVERS
    each, network, everybody = (limit.requests for limit in limits)
    assert f"*questions* are {DISCOVER_PER_CLIENT.requests} requests to `POST /discover` per client" in text
    assert f"{each} that are not registered per client, {network} per network and {everybody} in all" in text
    assert {limit.window for limit in (*limits, DISCOVER_PER_CLIENT)} == {timedelta(hours=1)}
