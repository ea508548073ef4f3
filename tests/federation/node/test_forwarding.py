"""`PROXY`: who may have what relayed to whom, and that no target can harm the relay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import httpx
import pytest

from federation.node.app import FOLLOWS_PATH
from federation.node.forwarding import MAX_FORWARDS, MAX_FORWARDS_PER_TARGET
from federation.node.shares import SHARES
from federation.protocol.keys import generate_own_keys
from federation.protocol.relaying import RELAY_PATH
from tests.federation.node.conftest import OWN_URL, Node, serving
from tests.federation.node.remote_server import RemoteServer
from tests.misbehaving import (
    Behaviour,
    Exchange,
    MisbehavingServer,
    Received,
    drip_body,
    garbage,
    hang,
    huge_body,
    redirect,
    reset,
    respond,
    respond_with,
    truncate,
)
from tests.patience import until
from tests.peer import introduce
from tests.relaying_peer import RelayingPeer

Events = list[MutableMapping[str, Any]]


@pytest.fixture
async def target(peer: RemoteServer) -> AsyncIterator[RelayingPeer]:
    """A server that knows *peer*, not the relay."""
    async with RelayingPeer(generate_own_keys()) as running:
        introduce(running, peer.url, peer.keys)
        yield running


async def know(node: Node, target: RelayingPeer) -> None:
    """The target is registered at the relay, with keys that nothing here looks at."""
    await node.registry.register(url=target.url, public_key="c-signing", encryption_public_key="c-encryption")


def proxied(peer: RemoteServer, target: RelayingPeer, **changes: object) -> bytes:
    """A follow of the target's user, for a relay."""
    text = peer.relayed(target.url + FOLLOWS_PATH, peer.delivery(peer.follow(), "FEDERATE", target.keys))
    return peer.proxied(text, target.url, target.keys, **changes)


async def ask(node: Node, peer: RemoteServer, body: bytes) -> httpx.Response:
    return await node.proxy(body, bearer=peer.url)


async def test_a_sealed_request_is_passed_on(
    node: Node, peer: RemoteServer, target: RelayingPeer, events: Events
) -> None:
    """In the relay's name, without what only the relay had to know; the answer comes back as it was."""
    await know(node, target)
    body = proxied(peer, target)

    response = await ask(node, peer, body)

    assert response.status_code == 200
    [passed_on] = target.deliveries
    assert json.loads(passed_on.body) == {"method": "TARGETED", "payload": json.loads(body)["payload"]}
    assert {name: passed_on.headers[name] for name in ("origin", "x-federation-origin", "x-federation-sender")} == {
        "origin": OWN_URL,
        "x-federation-origin": OWN_URL,
        "x-federation-sender": peer.url,
    }
    answer = response.json()
    assert answer.keys() == {"method", "payload"}
    assert answer["method"] == "PROXY_RESPONSE"
    assert answer["payload"]["status"] == "acknowledged"
    assert len(target.applied) == 1
    [line] = [event for event in events if event["event"] == "relay_forwarded"]
    assert (line["sender"], line["target"], line["status"]) == (peer.url, target.url, 200)


async def test_an_unknown_target_is_discovered(node: Node, peer: RemoteServer, other: RemoteServer) -> None:
    """Then registered, and told who we are, and asked."""
    async with RelayingPeer(other.keys) as target:
        introduce(target, peer.url, peer.keys)

        response = await ask(node, peer, proxied(peer, target))

        assert response.status_code == 200
        assert target.discoveries == ["GET", "REGISTER"]
        assert await node.registry.find(target.url) is not None


@pytest.mark.parametrize("kind", ["no document", "hangs up", "private address"])
async def test_a_target_that_cannot_be_discovered_is_a_bad_gateway(
    node: Node, peer: RemoteServer, target: RelayingPeer, kind: str
) -> None:
    """502 with the network's code if there is one, where others fail with 500; and nothing of our network."""
    target.server.routes["/discover"] = reset() if kind == "hangs up" else respond(200, body=b"it works")
    changes = {"targetUrl": "http://10.0.0.1/proxy"} if kind == "private address" else {}

    response = await ask(node, peer, proxied(peer, target, **changes))

    assert response.status_code == 502
    assert response.json() == {
        "method": "PROXY_RESPONSE",
        "error": "The target could not be asked",
        "code": "FAILED_TO_PROXY_REQUEST",
    } | ({"federationError": "CONN_RESET"} if kind == "hangs up" else {})


@pytest.mark.parametrize(
    "changes",
    [
        {"targetUrl": None},
        {"targetUrl": 1},
        {"targetUrl": ""},
        {"targetUrl": "nonsense"},
        {"targetUrl": "https://[::1/proxy"},
        {"targetUrl": "javascript:/proxy"},
        {"targetUrl": "https://user@c.example/proxy"},
        {"targetUrl": "https://c.example/"},
        {"targetUrl": "https://c.example/admin"},
        {"targetUrl": "https://c.example/admin/proxy"},
        {"targetUrl": "https://c.example/proxy/../admin"},
        {"targetUrl": "https://c.example/proxy/%2e%2e/admin"},
        {"targetUrl": "https://c.example/?/proxy"},
        {"targetUrl": f"{OWN_URL}/proxy"},
        {"targetUrl": "https://B.example:443/proxy"},
        {"targetUrl": "https://a.example/proxy"},
        {"publicSigningKey": None},
        {"publicEncryptionKey": ""},
        {"payload": None},
        {"payload": {"iv": "x"}},
    ],
    ids=str,
)
async def test_what_no_relay_is_asked_is_invalid(
    node: Node, peer: RemoteServer, target: RelayingPeer, changes: dict[str, object]
) -> None:
    """400 INVALID_PROXY_DATA: malformed, another path, ourselves, or back to the sender."""
    response = await ask(node, peer, proxied(peer, target, **changes))

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_PROXY_DATA")
    assert target.server.requests == []


async def test_nobody_unregistered_is_relayed_for(
    node: Node, peer: RemoteServer, other: RemoteServer, target: RelayingPeer
) -> None:
    """403, and the target hears nothing."""
    response = await ask(node, other, proxied(other, target))

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")
    assert target.server.requests == []


@pytest.mark.parametrize("member", ["publicSigningKey", "publicEncryptionKey"])
async def test_the_keys_have_to_be_the_registered_ones(
    node: Node, peer: RemoteServer, other: RemoteServer, target: RelayingPeer, member: str
) -> None:
    """403 INCORRECT_KEYS if one is another's."""
    wrong = json.loads(proxied(other, target))[member]

    response = await ask(node, peer, proxied(peer, target, **{member: wrong}))

    assert (response.status_code, response.json()["code"]) == (403, "INCORRECT_KEYS")
    assert target.server.requests == []


async def test_a_blacklisted_target_is_not_relayed_to(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    """403, by any spelling."""
    await know(node, target)
    await node.blacklist(target.url)

    response = await ask(
        node, peer, proxied(peer, target, targetUrl=f"{target.url.upper()}/proxy".replace("/PROXY", ""))
    )

    assert (response.status_code, response.json()["code"]) == (403, "BLACKLISTED_FEDERATION_SERVER")
    assert target.server.requests == []


async def test_a_blacklisted_sender_is_not_relayed_for(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    """403, though its header is written in another spelling."""
    await node.blacklist(peer.url)

    response = await ask(node, replace(peer, url="https://A.example/"), proxied(peer, target))

    assert response.status_code == 403
    assert target.server.requests == []


async def test_a_refusal_of_the_target_is_told(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    """502 with the target's JSON in `details`."""
    await know(node, target)
    target.senders.clear()

    response = await ask(node, peer, proxied(peer, target))

    assert response.status_code == 502
    body = response.json()
    assert (body["method"], body["code"]) == ("PROXY_RESPONSE", "FAILED_TO_PROXY_REQUEST")
    assert body["details"]["code"] == "UNKNOWN_FEDERATION_SERVER_INTERACTION"
    assert "federationError" not in body


TRAP = "http://127.0.0.1:1/proxy"
UNWELCOME: dict[str, Behaviour] = {
    "a page": respond(404, body=b"<html>not here"),
    "a redirect": redirect(TRAP),
    "a long page": respond(500, body=b"x" * 900_000),
    "not UTF-8": respond(500, body=b"\xff\xfe"),
    "a text of no UTF-8": respond(400, body=b'{"error":"\\ud800"}'),
    "a number beyond": respond(400, body=b'{"error":1e999}'),
    "2xx that is no JSON": respond(200, body=b"fine"),
    "2xx and nothing": respond(204, body=b""),
    "2xx and NaN": respond(200, body=b"NaN"),
    "2xx and nested": respond(200, body=b"[" * 100_000),
}


@pytest.mark.parametrize("kind", UNWELCOME)
async def test_no_answer_of_a_target_breaks_the_relay(
    node: Node, peer: RemoteServer, target: RelayingPeer, kind: str
) -> None:
    """502 with a few words of it; redirects are not followed."""
    await know(node, target)
    target.server.routes[RELAY_PATH] = UNWELCOME[kind]

    response = await ask(node, peer, proxied(peer, target))

    body = response.json()
    assert (response.status_code, body["code"], body["method"]) == (502, "FAILED_TO_PROXY_REQUEST", "PROXY_RESPONSE")
    assert "details" in body
    assert len(response.content) < 5000
    assert target.server.hits == 1


async def test_an_answer_is_passed_on_as_it_came(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    """Also one that we could not write ourselves."""
    await know(node, target)
    answer = b'\xef\xbb\xbf {"a": "\\ud800", "b": 1e999, "a": 2} \n'
    target.server.routes[RELAY_PATH] = respond(200, body=answer)

    response = await ask(node, peer, proxied(peer, target))

    assert response.content == b'{"method":"PROXY_RESPONSE","payload": {"a": "\\ud800", "b": 1e999, "a": 2} \n}'


BROKEN: dict[str, tuple[Behaviour, str | None]] = {
    "reset": (reset(), "CONN_RESET"),
    "cut off": (truncate(), "CONN_RESET"),
    "garbage": (garbage(), "UNKNOWN"),
    "endless": (huge_body(), None),
    "announced endless": (huge_body(announced=True), None),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_target_that_does_not_answer_is_a_bad_gateway(
    node: Node, peer: RemoteServer, target: RelayingPeer, kind: str
) -> None:
    """502 with the network's code; the target's health is not the relay's to judge."""
    await know(node, target)
    behaviour, code = BROKEN[kind]
    target.server.routes[RELAY_PATH] = behaviour

    response = await ask(node, peer, proxied(peer, target))

    body = response.json()
    assert (response.status_code, body["code"], body.get("federationError")) == (502, "FAILED_TO_PROXY_REQUEST", code)
    server = await node.registry.find(target.url)
    assert server is not None
    assert server.is_healthy
    assert node.probes == []


@pytest.mark.parametrize("kind", ["hang", "drip"])
async def test_a_slow_target_is_given_up(
    node: Node, peer: RemoteServer, target: RelayingPeer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """502 TIMEOUT, with the body counted in."""
    monkeypatch.setattr("federation.node.forwarding.FORWARD_TIMEOUT", timedelta(milliseconds=100))
    await know(node, target)
    target.server.routes[RELAY_PATH] = {"hang": hang(), "drip": drip_body()}[kind]

    response = await ask(node, peer, proxied(peer, target))

    assert (response.status_code, response.json()["federationError"]) == (502, "TIMEOUT")


async def test_one_target_cannot_take_all_connections(
    node: Node, peer: RemoteServer, target: RelayingPeer, database_url: str
) -> None:
    """Four relayed at once wait for it; the fifth is told to come back, and room comes back."""
    await know(node, target)
    async with serving(database_url, proxies=[ip_network("10.0.0.0/8")], client_address="10.0.0.1") as visited:
        await _relays_that_hang(visited, peer, target)


async def _relays_that_hang(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    clients = iter({"X-Forwarded-For": f"192.0.{number}.1"} for number in range(9))

    async def ask() -> httpx.Response:
        return await node.proxy(proxied(peer, target), bearer=peer.url, **next(clients))

    done = asyncio.Event()

    async def wait(request: Received, exchange: Exchange) -> None:
        await done.wait()
        await respond_with(target.proxy)(request, exchange)

    target.server.routes[RELAY_PATH] = wait
    asked = [asyncio.create_task(ask()) for _ in range(MAX_FORWARDS_PER_TARGET)]
    await until(lambda: len(target.deliveries) == MAX_FORWARDS_PER_TARGET)

    refused = await ask()
    done.set()

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert [response.status_code for response in await asyncio.gather(*asked)] == [200] * MAX_FORWARDS_PER_TARGET
    assert (await ask()).status_code == 200


async def test_a_relayed_request_is_not_relayed_again(node: Node, peer: RemoteServer, target: RelayingPeer) -> None:
    """A request that, once opened, asks for another relay is none: what is relayed has to be a delivery."""
    inner = peer.relayed(f"{OWN_URL}{RELAY_PATH}", proxied(peer, target))

    response = await node.proxy(peer.targeted(inner, node.keys), bearer=peer.url)

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_PAYLOAD")
    assert target.server.requests == []


async def test_one_client_cannot_take_all_relays(
    node: Node, peer: RemoteServer, target: RelayingPeer, database_url: str
) -> None:
    """A hundred requests of one client for servers that hang leave room for another's, as its network does."""
    await know(node, target)
    released = asyncio.Event()

    async def wait(request: Received, exchange: Exchange) -> None:
        await released.wait()
        await respond()(request, exchange)

    async with AsyncExitStack() as stack:
        hanging = [await stack.enter_async_context(MisbehavingServer()) for _ in range(10)]
        for number, server in enumerate(hanging):
            server.routes[RELAY_PATH] = wait
            await node.registry.register(url=server.url, public_key=f"{number}-s", encryption_public_key=f"{number}-e")
        visited = await stack.enter_async_context(
            serving(database_url, proxies=[ip_network("10.0.0.0/8")], client_address="10.0.0.1")
        )
        asked = [
            asyncio.create_task(
                visited.proxy(
                    proxied(peer, target, targetUrl=hanging[number % 10].url + RELAY_PATH),
                    bearer=peer.url,
                    **{"X-Forwarded-For": "192.0.2.1"},
                )
            )
            for number in range(100)
        ]
        await until(lambda: sum(server.hits for server in hanging) == MAX_FORWARDS // SHARES)

        served = await visited.proxy(proxied(peer, target), bearer=peer.url, **{"X-Forwarded-For": "198.51.100.1"})

        assert served.status_code == 200
        assert sum(server.hits for server in hanging) == MAX_FORWARDS // SHARES
        released.set()
        await asyncio.gather(*asked)
