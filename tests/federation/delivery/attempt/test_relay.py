"""Deliveries to a server whose name does not resolve here, but at a peer."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from db import DeliveryState, HoldReason
from federation.base.settings.settings import Settings
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.protocol.acks import ack_response, follow_ack
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import FOLLOWED, FOLLOWER, Site
from tests.federation.http.conftest import ScriptedResolver
from tests.federation.protocol.vectors import A
from tests.misbehaving import respond_with
from tests.peer import acquaint, inline, introduce, json_answer
from tests.relaying_peer import RelayingPeer
from workers import JobState

TARGET = "http://c.example"


@pytest.fixture
async def federation(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Federation]:
    """A node for which no name resolves."""
    guard = AddressGuard(settings.dev_allowed_hostnames)
    transport = ConnectionPool(guard, ssl_context=ssl_context, resolver=ScriptedResolver())
    node = Federation(settings, client=FederationClient(guard, transport))
    yield node
    await node.close()


@pytest.fixture
async def target(federation: Federation) -> RelayingPeer:
    """The server `TARGET`, acquainted with the node."""
    unreachable = RelayingPeer(generate_own_keys())
    unreachable.render = inline
    await federation.registry.register(
        url=TARGET,
        public_key=unreachable.keys.signing.public_text,
        encryption_public_key=unreachable.keys.encryption.public_text,
    )
    introduce(unreachable, "https://a.example")
    return unreachable


@pytest.fixture
async def relay(federation: Federation, target: RelayingPeer) -> AsyncIterator[RelayingPeer]:
    """An acquainted, healthy peer that reaches the target."""
    async with RelayingPeer() as peer:
        peer.reaches[TARGET] = target
        await acquaint(federation, peer)
        yield peer


async def owe_follow(site: Site) -> str:
    """A follow of the target's user is stored and owed."""
    async with site.federation.outbox.transaction() as session:
        requested = await site.federation.producers.request_follow(
            session, follower_id=FOLLOWER, following_id=FOLLOWED, server_url=TARGET
        )
    return requested.delivery_id


async def test_a_follow_goes_out_through_a_peer(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """The acknowledgment comes back under `payload`, is the target's, and is applied; the log names the relay."""
    async with Site(federation) as site:
        fate = await site.outcome(await owe_follow(site))
        follow = await site.follow()
        server = await site.server(TARGET)
        link = await federation.links.find(TARGET)

    assert (fate.state, fate.row, fate.job.attempt) == (JobState.COMPLETED, None, 1)
    assert follow is not None
    assert follow.accepted
    [attempt] = fate.log
    assert (attempt.outcome, attempt.relayed_by, attempt.http_status) == ("delivered", relay.url, 200)
    assert (len(relay.relayed), len(target.applied)) == (1, 1)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason, link.relayed) == (False, "DNS_BLOCKED", True)


async def test_a_peer_cannot_answer_for_the_target(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """An acknowledgment that is not signed by the target accepts nothing, though the peer guessed who follows whom."""
    plaintext = follow_ack(
        sender_url="https://a.example",
        follow_id="forged",
        created_at=datetime.now(UTC),
        follower_id=FOLLOWER,
        following_id=FOLLOWED,
        accepted=True,
    )
    forged = ack_response(
        plaintext, recipient_key=A.keys.encryption.public, signing_secret=relay.keys.signing.secret, accepted=True
    )
    relay.server.routes["/proxy"] = respond_with(lambda _: json_answer(forged))

    async with Site(federation) as site:
        fate = await site.outcome(await owe_follow(site))
        follow = await site.follow()

    assert (fate.state, fate.codes) == (JobState.FAILED, ["INVALID_ACK_SIGNATURE"])
    assert follow is not None
    assert not follow.accepted


async def test_without_any_peer_the_delivery_waits(federation: Federation, target: RelayingPeer) -> None:
    """The sweep finds nobody; the direct failure decides: the delivery is held, and the row says both."""
    async with Site(federation) as site:
        fate = await site.outcome(await owe_follow(site))

    assert (fate.state, fate.codes) == (None, ["DNS_BLOCKED"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert "relay: no peer is healthy" in (fate.row.last_error or "")
    assert [attempt.relayed_by for attempt in fate.log] == [None] * 5
