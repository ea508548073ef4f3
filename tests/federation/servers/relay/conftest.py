"""A node that cannot resolve its target, and peers that can."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.http.conftest import ScriptedResolver
from tests.federation.servers.relay.sending import MANY, RELAYS, TARGET, change
from tests.peer import acquaint, introduce
from tests.relaying_peer import RelayingPeer


@pytest.fixture
async def federation(make_settings: MakeSettings, ssl_context: ssl.SSLContext) -> AsyncIterator[Federation]:
    """A node for which no names resolve but those of `MANY` and `RELAYS`."""
    settings = make_settings(dev_allowed_hostnames=",".join(["127.0.0.1", *MANY, *RELAYS]))
    guard = AddressGuard(settings.dev_allowed_hostnames)
    resolver = ScriptedResolver(**{name.replace(".", "_"): [["127.0.0.1"]] for name in MANY + RELAYS})
    transport = ConnectionPool(guard, ssl_context=ssl_context, resolver=resolver)
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
    """Four acquainted peers that reach the target, the one known for longest first."""
    peers = [RelayingPeer(generate_own_keys(), host=name) for name in RELAYS]
    async with peers[0], peers[1], peers[2], peers[3]:
        for age, peer in enumerate(peers):
            peer.reaches[TARGET] = target
            await acquaint(federation, peer)
            await change(federation, peer, created_at=datetime.now(UTC) - timedelta(minutes=9 - age))
        yield peers


@pytest.fixture
async def relay(federation: Federation, target: RelayingPeer) -> AsyncIterator[RelayingPeer]:
    """One acquainted peer that reaches the target."""
    async with RelayingPeer() as peer:
        peer.reaches[TARGET] = target
        await acquaint(federation, peer)
        yield peer
