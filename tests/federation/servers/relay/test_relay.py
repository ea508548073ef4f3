"""Relaying, seen from the sender: whom it asks, what the peers learn, and that nobody holds it up."""

from __future__ import annotations

import json
import time
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from federation.http.errors import NetworkError
from federation.protocol.activities import delivery_headers
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import post_payload
from tests.federation.protocol.vectors import A
from tests.federation.servers.relay.sending import BUDGET, TARGET, deliver, health
from tests.misbehaving import (
    Behaviour,
    drip_body,
    hang,
    huge_body,
    redirect,
    reset,
    respond,
    respond_with,
)
from tests.peer import POSTS_PATH, json_answer
from tests.relaying_peer import RelayingPeer

Events = list[MutableMapping[str, Any]]


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
    "compressed": (respond(200, {"Content-Encoding": "br"}, b"\x8b"), "NO_ACK"),
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
    assert refused.get("encoding") == ("br" if kind == "compressed" else None)


async def test_at_most_three_peers_are_asked(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """In their order; then the direct failure stands, with its code, and with what the peers said."""
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
