"""Whom a node asks to relay, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, update
from sqlmodel import col

from db import BlacklistedServer, RelayCandidate, Server
from federation.http.errors import NetworkError
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.sealed.relays.peers import RelayPeers
from tests.federation.servers.relay.sending import TARGET, change, deliver, make_sick
from tests.relaying_peer import RelayingPeer


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


async def register(federation: Federation, *urls: str) -> None:
    for url in urls:
        keys = generate_own_keys()
        await federation.registry.register(
            url=url, public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text
        )


async def test_introducing_itself_again_buys_a_server_no_place(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """Strangers that register again and again displace neither who delivered nor who was there before them."""
    hostile = [f"https://hostile{number}.test" for number in range(3)]
    await register(federation, *hostile)
    await federation.links.succeeded(relays[3].url)
    await federation.links.succeeded(relays[2].url, relayed=True)
    for _ in range(3):
        await register(federation, *hostile)
        assert await fresh_choice(federation).healthy(TARGET) == [relays[3].url, relays[0].url, relays[1].url]


def fresh_choice(federation: Federation) -> RelayPeers:
    """As a process chooses that has read no order yet."""
    return RelayPeers(federation.database, federation.registry, federation.client, own_url="https://a.example")


async def test_one_owner_is_one_candidate(
    federation: Federation, target: RelayingPeer, relays: list[RelayingPeer]
) -> None:
    """However many servers of a domain delivered first; a second of them is asked where the first is sick."""
    owned = [f"https://s{number:02}.hostile.test" for number in range(60)]
    await register(federation, *owned)
    async with federation.database.transaction() as session:
        early = datetime.now(UTC) - timedelta(days=30)
        await session.execute(update(Server).where(col(Server.url).in_(owned)).values(created_at=early))
    assert await federation.relay_peers.healthy(TARGET) == [owned[0], relays[0].url, relays[1].url]

    await federation.registry.mark_unhealthy(owned[0], "TIMEOUT")
    assert await federation.relay_peers.healthy(TARGET) == [relays[0].url, relays[1].url, relays[2].url]
    for peer in relays:
        await make_sick(federation, peer, "TIMEOUT")
    assert await federation.relay_peers.healthy(TARGET) == [owned[1]]


async def test_who_is_well_again_is_a_candidate_at_once(
    federation: Federation, target: RelayingPeer, relay: RelayingPeer
) -> None:
    """Where there was nobody, nobody is not what is remembered."""
    await make_sick(federation, relay, "TIMEOUT")
    assert await federation.relay_peers.healthy(TARGET) == []
    await change(federation, relay, is_healthy=True)
    assert await federation.relay_peers.healthy(TARGET) == [relay.url]


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
