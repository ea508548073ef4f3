"""`REGISTER` of servers that show keys that are not theirs: whoever proves to hold a key has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import Server
from federation.protocol.discovery import register_request
from federation.protocol.encodings import dump_json, encode_base64
from federation.protocol.keys import OwnKeys, generate_own_keys, verify_signature
from federation.protocol.possession import possession_nonce
from tests.federation.node.conftest import OWN_URL, Node
from tests.federation.node.remote_server import RemoteServer
from tests.misbehaving import respond
from tests.peer import Peer, Pings, introduce
from tests.squatters import Pretence, Squatter

Events = list[MutableMapping[str, Any]]

SMALL_ORDER = [bytes(32), bytes([1]) + bytes(31), bytes.fromhex("ec" + 30 * "ff" + "7f")]
"""On both curves."""


@pytest.fixture
async def victim(node: Node) -> AsyncIterator[Peer]:
    """A server on loopback that knows us, and is not registered yet."""
    async with Peer(generate_own_keys()) as running:
        introduce(running, OWN_URL, node.keys)
        yield running


@pytest.fixture
async def loopback(node: Node) -> AsyncIterator[AsyncExitStack]:
    """What is entered here serves until the test ends."""
    async with AsyncExitStack() as stack:
        yield stack


async def squatting(loopback: AsyncExitStack, node: Node, victim: Peer, **shown: bool) -> Squatter:
    """A server that shows keys of the victim, knows us, and is known to the victim."""
    squatter = await loopback.enter_async_context(Squatter(victim, **shown))
    introduce(squatter, OWN_URL, node.keys)
    introduce(victim, squatter.url, squatter.keys)
    return squatter


async def register(node: Node, server: Peer) -> httpx.Response:
    keys = server.shown if isinstance(server, Squatter) else server.keys
    return await node.discover(register_request(url=server.url, keys=keys))


async def row(node: Node, server: Peer) -> Server | None:
    async with node.database.read() as session:
        found: Server | None = (
            await session.execute(select(Server).where(col(Server.url) == server.url))
        ).scalar_one_or_none()
        return found


async def test_a_server_that_proves_its_keys_is_asked_once(node: Node, victim: Peer) -> None:
    """At its first registration alone."""
    answers = [(await register(node, victim)).status_code for _ in range(2)]

    assert answers == [200, 200]
    assert len(victim.pinged) == 1
    stored = await row(node, victim)
    assert stored is not None
    assert stored.proved_at is not None


@pytest.mark.parametrize("pings", [Pings.OPENS_ALL, Pings.UNKNOWN])
async def test_servers_of_earlier_versions_register(node: Node, victim: Peer, pings: Pings) -> None:
    """Whether they answer every ping or none: nobody else has their keys."""
    victim.pings = pings

    assert (await register(node, victim)).status_code == 200

    stored = await row(node, victim)
    assert stored is not None
    assert (stored.proved_at is not None) == (pings is Pings.OPENS_ALL)


@pytest.mark.parametrize(
    "shown",
    [{}, {"signing": False}, {"encryption": False}],
    ids=["both keys", "its encryption key", "its signing key"],
)
async def test_a_squatter_does_not_keep_the_owner_out(
    node: Node, victim: Peer, loopback: AsyncExitStack, events: Events, shown: dict[str, bool]
) -> None:
    """It came first, with public keys; the owner proves to hold them, and its follows are taken."""
    squatter = await squatting(loopback, node, victim, **shown)
    assert (await register(node, squatter)).status_code == 200

    assert (await register(node, victim)).status_code == 200

    assert await row(node, squatter) is None
    owner = RemoteServer(url=victim.url, keys=victim.keys)
    assert (await node.follow(owner)).status_code == 200
    [told] = [event for event in events if event["event"] == "keys_reassigned"]
    assert (told["server_url"], told["held_by"]) == (victim.url, squatter.url)
    assert (await register(node, squatter)).status_code == 409
    assert await row(node, victim) is not None


async def test_who_cannot_open_what_is_sealed_to_its_key_is_not_registered(
    node: Node, victim: Peer, loopback: AsyncExitStack
) -> None:
    """It says so itself."""
    squatter = await squatting(loopback, node, victim)
    squatter.pretence = Pretence.CANNOT

    answer = await register(node, squatter)

    assert answer.status_code == 400
    assert await row(node, squatter) is None


async def test_a_forged_signature_refutes(node: Node, victim: Peer) -> None:
    """Whoever signs what it opened has to hold the signing key that it shows."""
    shown = victim.keys
    victim.keys = OwnKeys(signing=generate_own_keys().signing, encryption=shown.encryption)
    forged = {**victim.document(), "publicKey": shown.signing.public_text}
    victim.server.routes["/discover"] = respond(body=dump_json(forged).encode())

    answer = await node.discover(register_request(url=victim.url, keys=shown))

    assert answer.status_code == 400
    assert await row(node, victim) is None


async def test_the_owner_opens_nothing_for_a_squatter(node: Node, victim: Peer, loopback: AsyncExitStack) -> None:
    """The ping names the squatter, which hands it on in vain."""
    squatter = await squatting(loopback, node, victim)
    squatter.pretence = Pretence.HANDS_ON
    await register(node, squatter)

    assert (await register(node, victim)).status_code == 200
    assert await row(node, squatter) is None
    assert len(squatter.pinged) == 2


async def test_nothing_changes_where_both_can_open(
    node: Node, victim: Peer, loopback: AsyncExitStack, events: Events
) -> None:
    """A server of an earlier version opens for everybody: the operator is told of both."""
    squatter = await squatting(loopback, node, victim)
    squatter.pretence, victim.pings = Pretence.HANDS_ON, Pings.OPENS_ALL
    assert (await register(node, squatter)).status_code == 200

    assert (await register(node, victim)).status_code == 409

    assert await row(node, victim) is None
    held = await row(node, squatter)
    assert held is not None
    assert (held.claimed_by, held.claim_proved) == (victim.url, True)
    [told] = [event for event in events if event["event"] == "keys_taken"]
    assert (told["server_url"], told["held_by"], told["proved"]) == (victim.url, squatter.url, True)


async def test_nothing_changes_where_neither_can_open(node: Node, victim: Peer, loopback: AsyncExitStack) -> None:
    """A server that knows no pings proves nothing, and who holds its keys need not."""
    squatter = await squatting(loopback, node, victim)
    victim.pings = Pings.UNKNOWN
    await register(node, squatter)

    assert (await register(node, victim)).status_code == 409

    held = await row(node, squatter)
    assert held is not None
    assert (held.claimed_by, held.claim_proved) == (victim.url, False)
    assert len(squatter.pinged) == 1


async def test_who_proved_its_keys_may_be_silent(node: Node, victim: Peer, loopback: AsyncExitStack) -> None:
    """Of a key that two can open for, nobody is robbed by silencing him; one who never proved it loses it."""
    squatter = await squatting(loopback, node, victim)
    squatter.pretence, victim.pings = Pretence.HANDS_ON, Pings.OPENS_ALL
    await register(node, victim)
    await victim.server.stop()

    assert (await register(node, squatter)).status_code == 409

    async with node.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == victim.url).values(proved_at=None))
    assert (await register(node, squatter)).status_code == 200


async def test_a_claim_that_was_proved_gives_way_to_no_other_for_a_week(
    node: Node, victim: Peer, loopback: AsyncExitStack
) -> None:
    """Strangers cannot hide it by claims of their own."""
    owner, stranger = await squatting(loopback, node, victim), await squatting(loopback, node, victim)
    owner.pretence, victim.pings = Pretence.HANDS_ON, Pings.OPENS_ALL
    await register(node, victim)
    await register(node, owner)
    await register(node, stranger)

    held = await row(node, victim)
    assert held is not None
    assert (held.claimed_by, held.claim_proved) == (owner.url, True)

    async with node.database.transaction() as session:
        old = update(Server).where(col(Server.url) == victim.url)
        await session.execute(old.values(claimed_at=datetime.now(UTC) - timedelta(days=8)))
    await register(node, stranger)
    held = await row(node, victim)
    assert held is not None
    assert (held.claimed_by, held.claim_proved) == (stranger.url, False)


@pytest.mark.parametrize("shown", [{}, {"signing": False}, {"encryption": False}], ids=["both", "sealing", "signing"])
async def test_our_own_keys_are_registered_for_nobody(
    node: Node, loopback: AsyncExitStack, events: Events, shown: dict[str, bool]
) -> None:
    """409, and the log says who shows them."""
    thief = await squatting(loopback, node, await loopback.enter_async_context(Peer(node.keys)), **shown)

    answer = await register(node, thief)

    assert answer.status_code == 409
    assert await row(node, thief) is None
    assert thief.pinged == []
    [told] = [event for event in events if event["event"] == "keys_taken"]
    assert (told["server_url"], told["held_by"]) == (thief.url, OWN_URL)


async def test_unusable_keys_are_refused_at_every_entrance(node: Node, victim: Peer, other: RemoteServer) -> None:
    """Anybody could sign or open for them: 400 to a claim, to what `/discover` shows, and to DISCOVER."""
    await node.know(other)
    for member in ("publicKey", "encryptionPublicKey"):
        for raw in SMALL_ORDER:
            bad = {member: encode_base64(raw)}
            assert (await node.discover(other.register(**bad))).status_code == 400
            victim.server.upcoming.append(respond(body=dump_json({**victim.document(), **bad}).encode()))
            assert (await register(node, victim)).status_code == 400
            question = {"method": "DISCOVER", **other.identity(), "envelope": None, **bad}
            assert "not a usable" in (await node.discover(dump_json(question).encode())).text
    assert await row(node, victim) is None


async def test_possession_is_proved_by_the_pair_that_was_asked(node: Node, peer: RemoteServer) -> None:
    """The nonce comes back signed, so that it shows both keys."""
    nonce = possession_nonce(OWN_URL, peer.url)
    ping = dump_json({"method": "PING", "nonce": nonce})

    answer = (await node.proxy(peer.targeted(ping, node.keys), bearer=peer.url)).json()
    stranger = await node.proxy(peer.targeted(ping, node.keys), bearer="https://stranger.example")

    assert verify_signature(nonce, answer.pop("signature"), node.keys.signing.public)
    assert answer == {"method": "PROXY_RESPONSE", "status": "pong", "nonce": nonce}
    assert (stranger.status_code, stranger.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")


@pytest.mark.parametrize("nonce", [f"possession:https://evil.example:{OWN_URL}:r", "possession:", "possession:x"])
async def test_possession_is_not_proved_for_others(node: Node, peer: RemoteServer, events: Events, nonce: str) -> None:
    """A registered server cannot have us open what was sealed to our key in its place."""
    ping = dump_json({"method": "PING", "nonce": nonce})

    response = await node.proxy(peer.targeted(ping, node.keys), bearer=peer.url)

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_TARGETED_DATA")
    assert nonce not in response.text
    assert [event["code"] for event in events] == ["POSSESSION_OF_ANOTHER"]
