"""Relaying, seen from the sender: whom it asks, what the peers learn, and that nobody holds it up."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update
from sqlmodel import col
from structlog.testing import capture_logs

from db import BlacklistedServer, RelayCandidate, Server
from federation.app import Federation
from federation.http.client import FederationClient
from federation.http.errors import NetworkError
from federation.http.gates import Fetched
from federation.http.guard import AddressGuard
from federation.http.transport import pooled_transport
from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers
from federation.protocol.keys import generate_own_keys
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH
from federation.protocol.sealing import seal
from federation.protocol.signing import sign_message
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.federation.http.conftest import ScriptedResolver
from tests.federation.protocol.vectors import A
from tests.misbehaving import (
    Behaviour,
    Canned,
    drip_body,
    hang,
    huge_body,
    redirect,
    reset,
    respond,
    respond_with,
)
from tests.peer import POSTS_PATH, Peer, acquaint, introduce, json_answer
from tests.relaying_peer import RelayingPeer

TARGET = "http://c.example"
MANY = [f"sick{number}.test" for number in range(30)]
BUDGET = timedelta(seconds=15)

Events = list[MutableMapping[str, Any]]


@pytest.fixture
async def federation(make_settings: MakeSettings, ssl_context: ssl.SSLContext) -> AsyncIterator[Federation]:
    """A node for which no names resolve but those of `MANY`."""
    settings = make_settings(dev_allowed_hostnames=",".join(["127.0.0.1", *MANY]))
    guard = AddressGuard(settings.dev_allowed_hostnames)
    resolver = ScriptedResolver(**{name.replace(".", "_"): [["127.0.0.1"]] for name in MANY})
    transport = pooled_transport(guard, ssl_context=ssl_context, resolver=resolver)
    node = Federation(settings, client=FederationClient(guard, transport))
    yield node
    await node.close()


@pytest.fixture
async def target(federation: Federation) -> RelayingPeer:
    """The server `TARGET`, which the node knows by name and cannot resolve."""
    unreachable = RelayingPeer(generate_own_keys())
    await federation.registry.register(
        url=TARGET,
        public_key=unreachable.keys.signing.public_text,
        encryption_public_key=unreachable.keys.encryption.public_text,
    )
    introduce(unreachable, "https://a.example")
    return unreachable


@pytest.fixture
async def relays(federation: Federation, target: RelayingPeer) -> AsyncIterator[list[RelayingPeer]]:
    """Four acquainted peers that reach the target, the one seen last first."""
    peers = [RelayingPeer(generate_own_keys()) for _ in range(4)]
    async with peers[0], peers[1], peers[2], peers[3]:
        for age, peer in enumerate(peers):
            peer.reaches[TARGET] = target
            await acquaint(federation, peer)
            await change(federation, peer, last_seen=datetime.now(UTC) - timedelta(minutes=age))
        yield peers


@pytest.fixture
async def relay(federation: Federation, target: RelayingPeer) -> AsyncIterator[RelayingPeer]:
    """One acquainted peer that reaches the target."""
    async with RelayingPeer() as peer:
        peer.reaches[TARGET] = target
        await acquaint(federation, peer)
        yield peer


async def change(federation: Federation, peer: Peer, **values: object) -> None:
    """The peer's row in the registry has these values."""
    async with federation.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == peer.url).values(values))
    federation.registry.forget(peer.url)


async def make_sick(federation: Federation, peer: Peer, reason: str | None) -> None:
    await change(federation, peer, is_healthy=False, unhealthy_reason=reason)


async def health(federation: Federation, peer: Peer) -> tuple[bool, str | None]:
    server = await federation.registry.find(peer.url)
    assert server is not None
    return server.is_healthy, server.unhealthy_reason


async def deliver(federation: Federation, target: Peer, *, text: str = "hello", timeout: timedelta = BUDGET) -> Fetched:
    """A post to the target, as the worker sends it."""
    payload = post_payload("post-1", text=text)
    url = TARGET + POSTS_PATH
    body = DeliveryRequest(
        method=ActivityMethod.FEDERATE_POST,
        payload=seal(payload, target.keys.encryption.public),
        signature=sign_message(payload, A.keys.signing.secret),
    ).to_bytes()
    return await federation.fetch(
        url,
        method="POST",
        headers=delivery_headers(own_url="https://a.example", target_url=url),
        body=body,
        timeout=timeout,
        proxy_fallback=True,
        server_url=TARGET,
    )


async def test_a_peer_relays_what_it_cannot_read(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """The peer sees our name, our keys and an envelope; the target sees the request as it would have come directly."""
    fetched = await deliver(federation, target)

    assert (fetched.peer, fetched.response.status) == (relay.url, 200)
    [request] = relay.deliveries
    assert (request.path, request.headers["origin"], request.headers["x-federation-origin"]) == (
        RELAY_PATH,
        "https://a.example",
        "https://a.example",
    )
    outer = json.loads(request.body)
    assert outer.keys() == {
        *("method", "targetUrl", "publicSigningKey", "publicEncryptionKey", "payload", "signature"),
    }
    assert (outer["method"], outer["targetUrl"]) == ("PROXY", "http://c.example/proxy")
    assert outer["publicSigningKey"] == A.keys.signing.public_text
    assert outer["publicEncryptionKey"] == A.keys.encryption.public_text
    [inner] = target.targeted
    url = TARGET + POSTS_PATH
    assert (inner.target_url, inner.method) == (url, "POST")
    assert inner.headers == delivery_headers(own_url="https://a.example", target_url=url)
    assert [arrived.activity_id for arrived in target.applied] == ["post-1"]
    assert await health(federation, relay) == (True, None)


REFUSALS: dict[str, tuple[Behaviour, str]] = {
    "unknown": (respond(403, body=b'{"error":"","code":"UNKNOWN_FEDERATION_SERVER_INTERACTION"}'), "HTTP_403"),
    "bad gateway": (respond(502), "INVALID_RESPONSE_FROM_TARGET"),
    "busy": (respond(503), "HTTP_503"),
    "redirect": (redirect("http://127.0.0.1:1/proxy"), "HTTP_307"),
    "no JSON": (respond(200, body=b"<html>"), "NO_ACK"),
    "no acknowledgment": (respond(200, body=b"{}"), "NO_ACK"),
    "endless": (huge_body(), "BodyTooLarge"),
    "reset": (reset(), "CONN_RESET"),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_the_next_peer_is_asked_if_one_fails(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer], kind: str
) -> None:
    """A peer that refuses, lies or breaks off is on record, and decides nothing about the delivery."""
    behaviour, code = REFUSALS[kind]
    relays[0].server.routes[RELAY_PATH] = behaviour

    with capture_logs() as logs:
        fetched = await deliver(federation, target)

    assert fetched.peer == relays[1].url
    [refused] = [event for event in logs if event["event"] == "relay_refused"]
    assert (refused["relayed_by"], refused["target"], refused["code"]) == (relays[0].url, TARGET, code)


async def test_at_most_three_peers_are_asked(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """In the order they were seen; then the direct failure stands, with its code, and with what the peers said."""
    for peer in relays[:3]:
        peer.reaches.clear()

    with capture_logs() as logs, pytest.raises(NetworkError) as caught:
        await deliver(federation, target)

    assert [len(peer.relayed) for peer in relays] == [1, 1, 1, 0]
    assert (caught.value.code, caught.value.origin) == ("DNS_BLOCKED", TARGET)
    assert isinstance(caught.value.__cause__, NetworkError)
    assert "relay" not in str(caught.value.__cause__)
    for peer in relays[:3]:
        assert f"{peer.url}: INVALID_RESPONSE_FROM_TARGET" in str(caught.value)
    assert [event["network_code"] for event in logs if event["event"] == "relay_refused"] == ["DNS_BLOCKED"] * 3


async def test_what_the_target_refuses_is_in_the_log(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Its code, through the relay's 502; no text, which might quote what was sent."""
    target.senders.clear()

    with capture_logs() as logs, pytest.raises(NetworkError, match="target_code UNKNOWN_FEDERATION_SERVER_INTERACTION"):
        await deliver(federation, target, text="a secret thought")

    [refused] = [event for event in logs if event["event"] == "relay_refused"]
    assert (refused["relay_code"], refused["target_code"]) == (
        "FAILED_TO_PROXY_REQUEST",
        "UNKNOWN_FEDERATION_SERVER_INTERACTION",
    )
    assert "secret thought" not in repr(logs)
    assert A.keys.signing.public_text not in repr(logs)


async def test_a_refusal_cannot_write_into_our_log(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """What has not the form of a code is left out."""
    body = {"error": "x", "code": "a\nfake line", "federationError": ["x"], "details": {"code": "x" * 9, "status": "1"}}
    relay.server.routes[RELAY_PATH] = respond_with(lambda _: json_answer(body, 502))

    with capture_logs() as logs, pytest.raises(NetworkError):
        await deliver(federation, target)

    [refused] = [event for event in logs if event["event"] == "relay_refused"]
    assert refused.keys() == {"event", "log_level", "relayed_by", "target", "code"}


@pytest.mark.parametrize("kind", ["hang", "drip"])
async def test_a_peer_that_hangs_leaves_time_for_the_next(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer], kind: str
) -> None:
    """It gets half of what is left, and stays healthy: its target may be the slow one."""
    relays[0].server.routes[RELAY_PATH] = {"hang": hang(), "drip": drip_body()}[kind]

    fetched = await deliver(federation, target, timeout=timedelta(seconds=3))

    assert fetched.peer == relays[1].url
    assert await health(federation, relays[0]) == (True, None)


async def test_all_peers_share_the_one_deadline(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """Three hanging peers hold a delivery no longer than one would."""
    for peer in relays:
        peer.server.routes[RELAY_PATH] = hang()
    started = time.monotonic()

    with pytest.raises(NetworkError) as caught:
        await deliver(federation, target, timeout=timedelta(milliseconds=600))

    assert time.monotonic() - started < BUDGET.total_seconds()
    assert caught.value.code == "DNS_BLOCKED"


async def test_a_peer_that_is_down_is_marked(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """It is no candidate for the next delivery, and a probe will heal it."""
    await relays[0].server.stop()

    assert (await deliver(federation, target)).peer == relays[1].url

    assert await health(federation, relays[0]) == (False, "CONN_REFUSED")


async def test_a_peer_that_asks_for_rest_gets_it(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """Peers count refused requests, too: one that says 429 is not asked again before its time."""
    relays[0].server.upcoming.append(respond(429, {"Retry-After": "60"}))

    assert [(await deliver(federation, target)).peer for _ in range(2)] == [relays[1].url] * 2

    assert len(relays[0].deliveries) == 1


async def test_blacklisted_and_sick_peers_are_no_candidates(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """The healthy ones nobody has banned are asked."""
    async with federation.database.transaction() as session:
        session.add(BlacklistedServer(server_url=relays[0].url, created_at=datetime.now(UTC), reason="test"))
    federation.registry.forget(relays[0].url)
    await make_sick(federation, relays[1], "TIMEOUT")

    assert (await deliver(federation, target)).peer == relays[2].url


async def test_the_ranked_come_first(federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]) -> None:
    """In the ranking's order, if they are healthy and registered; whoever has no rank follows."""

    async def ranking() -> list[str]:
        return ["http://gone.example", relays[1].url, relays[3].url, relays[2].url]

    await make_sick(federation, relays[1], "TIMEOUT")
    peers = type(federation.relay_peers)(
        federation.database, federation.registry, federation.client, own_url="https://a.example", ranking=ranking
    )

    assert await peers.healthy(TARGET) == [relays[3].url, relays[2].url, relays[0].url]


async def test_a_node_ranks_its_relays_as_its_analytics_do(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """What a run published in its database decides whom it asks first."""
    today = datetime.now(UTC).date()
    async with federation.database.transaction() as session:
        for rank, number in enumerate((2, 1), start=1):
            url = relays[number].url
            session.add(RelayCandidate(server_url=url, rank=rank, as_of=today, generation=1, score=90.0))

    assert (await federation.relay_peers.healthy(TARGET))[:2] == [relays[2].url, relays[1].url]


async def test_neither_the_target_nor_ourselves_relay(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Whatever the registry holds."""
    await federation.registry.register(url="https://a.example", public_key="a", encryption_public_key="a")

    assert await federation.relay_peers.healthy(TARGET) == [relay.url]
    assert await federation.relay_peers.healthy(relay.url) == [TARGET]


async def test_an_unregistered_target_is_not_relayed_to(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Without its key nothing can be sealed to it."""
    async with federation.database.transaction() as session:
        await session.execute(delete(Server).where(col(Server.url) == TARGET))
    with pytest.raises(NetworkError, match="not registered"):
        await deliver(federation, target)
    assert relay.relayed == []


# --- size


async def test_the_largest_post_that_fits_is_relayed(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Sealed twice, a typical post of 146 769 bytes makes a body just under the limit; one of 16 bytes more does not.

    The body grows in steps of four characters of base64, so the limit is met to within a few bytes.
    """
    size = len(post_payload("post-1", text="").encode())

    await deliver(federation, target, text="x" * (146_000 - size))
    [request] = relay.deliveries
    room = (MAX_RELAYED_BYTES - len(request.body)) * 9 // 16
    await deliver(federation, target, text="x" * (146_000 + room - 8 - size))

    largest = len(relay.deliveries[1].body)
    assert MAX_RELAYED_BYTES - 32 < largest <= MAX_RELAYED_BYTES
    with pytest.raises(NetworkError, match="too large to relay"):
        await deliver(federation, target, text="x" * (146_000 + room + 16 - size))
    assert len(relay.deliveries) == 2


# --- the emergency sweep


async def test_a_sick_peer_that_is_well_again_relays(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """With nobody healthy the sick are asked; who answers with its key is healthy, and the relay."""
    await make_sick(federation, relay, "CONN_REFUSED")

    with capture_logs() as logs:
        fetched = await deliver(federation, target)

    assert fetched.peer == relay.url
    assert relay.discoveries == ["GET"]
    assert await health(federation, relay) == (True, None)
    assert {"event": "relay_sweep", "probed": 1, "healed": 1, "log_level": "info"} in logs


SICK: dict[str, Callable[[RelayingPeer], Behaviour]] = {
    "silent": lambda _: hang(),
    "broken": lambda _: reset(),
    "another page": lambda _: respond(200, body=b"it works"),
    "another server": lambda peer: respond_with(lambda _: stranger_in_place_of(peer)),
    "a redirect": lambda _: redirect("http://127.0.0.1:1/discover"),
}


def stranger_in_place_of(peer: RelayingPeer) -> Canned:
    return json_answer({**peer.document(), "publicKey": generate_own_keys().signing.public_text})


@pytest.mark.parametrize("kind", SICK)
async def test_a_sick_peer_that_is_not_well_does_not_relay(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer, kind: str
) -> None:
    """Two seconds at most; the node is stranded and says so, and the direct failure stands."""
    await make_sick(federation, relay, None)
    relay.server.routes["/discover"] = SICK[kind](relay)

    with capture_logs() as logs, pytest.raises(NetworkError, match="no peer is healthy") as caught:
        await deliver(federation, target, timeout=timedelta(seconds=60))

    assert caught.value.code == "DNS_BLOCKED"
    assert await health(federation, relay) == (False, None)
    assert {"event": "relay_stranded", "probed": 1, "log_level": "warning"} in logs


@pytest.mark.parametrize("reason", ["DNS_BLOCKED", "INVALID_RESPONSE_FROM_TARGET"])
async def test_a_sickness_no_probe_can_tell_about_is_not_probed(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer, reason: str
) -> None:
    """Its policy forbids direct probes."""
    await make_sick(federation, relay, reason)

    with pytest.raises(NetworkError):
        await deliver(federation, target)

    assert relay.server.requests == []


async def test_a_sweep_is_shared_and_bounded(federation: Federation, target: RelayingPeer) -> None:
    """Fifty deliveries that need a relay make one sweep of twenty servers, ten at a time; the next is later."""
    at_once = most = 0

    async def slow(request: object, exchange: Any) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        await respond(500)(request, exchange)  # type: ignore[arg-type] # looks at neither

    async with Peer() as sick:
        sick.server.routes["/discover"] = slow
        for name in MANY:
            url = sick.server.url_for(name)
            keys = generate_own_keys()
            await federation.registry.register(
                url=url, public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text
            )
        async with federation.database.transaction() as session:
            await session.execute(update(Server).values(is_healthy=False, unhealthy_reason=None))
        failures = await asyncio.gather(*(deliver(federation, target) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(failure, NetworkError) for failure in failures)
        hits = sick.server.hits
        with pytest.raises(NetworkError):
            await deliver(federation, target)
        assert sick.server.hits == hits

    assert (hits, most) == (20, 10)
