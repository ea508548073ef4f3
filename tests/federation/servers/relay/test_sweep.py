"""The emergency sweep: with no healthy peer left the sick ones are asked whether they are well again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update
from structlog.testing import capture_logs

from db import Server
from federation.http.errors import NetworkError
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.servers.relay.sending import MANY, deliver, health, make_sick
from tests.misbehaving import (
    Behaviour,
    Canned,
    hang,
    redirect,
    reset,
    respond,
    respond_with,
)
from tests.peer import Peer, json_answer
from tests.relaying_peer import RelayingPeer


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


async def test_strangers_do_not_crowd_out_who_delivered(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Thirty that are sick and were seen just now leave the one that took deliveries its place among the twenty."""
    await federation.links.succeeded(relay.url)
    async with Peer() as stranger:
        stranger.server.routes["/discover"] = respond(500)
        for name in MANY:
            keys = generate_own_keys()
            await federation.registry.register(
                url=stranger.server.url_for(name),
                public_key=keys.signing.public_text,
                encryption_public_key=keys.encryption.public_text,
            )
        async with federation.database.transaction() as session:
            await session.execute(update(Server).values(is_healthy=False, unhealthy_reason=None))
        assert (await deliver(federation, target)).peer == relay.url


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
