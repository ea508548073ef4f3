"""Discovery: whom we believe to be a server, how we introduce ourselves, and what happens when that fails."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from functools import partial

import pytest
from structlog.testing import capture_logs

from federation.admin import blacklist
from federation.http.errors import BlockedUrl
from federation.protocol.keys import generate_own_keys
from federation.protocol.possession import NO_PROOF
from federation.runtime.composition import Federation
from federation.sealed.peers.claims import Claims
from federation.sealed.peers.discovery import DiscoveryError, ServerBlacklisted
from federation.sealed.peers.possession import MAX_PINGS_PER_HOST, Possession
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.protocol.vectors import A, B
from tests.misbehaving import Behaviour, hang, redirect, reset, respond, truncate
from tests.patience import until
from tests.peer import Peer, Pings, acquaint, settle
from tests.squatters import Pretence, Squatter

STRANGER = generate_own_keys()


async def test_an_unknown_server_is_registered_and_asked_to_register_us(federation: Federation, peer: Peer) -> None:
    """Both keys of its `/discover` are in the registry, ours in its."""
    found = await federation.discovery(peer.url)
    assert found == await federation.registry.find(peer.url)
    assert (found.url, found.is_healthy) == (peer.url, True)
    assert found.public_key == B.env["FEDERATION_PUBLIC_KEY"]
    assert found.encryption_public_key == B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"]
    assert peer.discoveries == ["GET", "REGISTER"]
    introduction = json.loads(peer.server.requests[1].body)
    assert introduction == {
        "method": "REGISTER",
        "url": OWN_URL,
        "publicKey": A.env["FEDERATION_PUBLIC_KEY"],
        "encryptionPublicKey": A.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
    }
    assert peer.server.requests[1].headers["content-type"] == "application/json"


async def test_concurrent_discoveries_of_one_server_are_one(federation: Federation, peer: Peer) -> None:
    """A burst of deliveries asks once; whoever is cancelled meanwhile fails nobody else."""
    callers = [asyncio.create_task(federation.discovery(peer.url)) for _ in range(10)]
    await asyncio.sleep(0)
    callers[0].cancel()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {getattr(result, "url", result) for result in results[1:]} == {peer.url}
    assert peer.discoveries == ["GET", "REGISTER"]


@pytest.mark.parametrize("rule", [None, "*.127.0.0.1"], ids=["origin", "star"])
async def test_a_blacklisted_server_is_not_discovered(federation: Federation, peer: Peer, rule: str | None) -> None:
    """Not a byte is sent, whoever asks for it."""
    await blacklist.add(federation.database, rule or peer.url, reason="spam")
    with pytest.raises(ServerBlacklisted, match="is blacklisted"):
        await federation.discovery(peer.url)
    assert peer.server.connections == 0
    assert await federation.registry.find(peer.url) is None


async def test_who_asks_for_a_rest_is_not_followed_for_now(federation: Federation, peer: Peer) -> None:
    """The rest cannot be noted within the application's transaction; the failure is still a discovery's."""
    await settle(federation, "here")
    peer.server.upcoming.append(respond(429))
    with pytest.raises(DiscoveryError, match="left alone"):
        async with federation.outbox.transaction() as session:
            await federation.producers.request_follow(
                session, follower_id="here", following_id="there", server_url=peer.url
            )


async def test_a_discovery_that_failed_is_tried_anew(federation: Federation, peer: Peer) -> None:
    """The failure is shared by those who waited for it, and not remembered."""
    peer.server.upcoming.append(respond(500))
    results = await asyncio.gather(*(federation.discovery(peer.url) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [DiscoveryError] * 3
    assert peer.discoveries == ["GET"]
    assert (await federation.discovery(peer.url)).url == peer.url


def document(**changes: object) -> bytes:
    keys = {
        "url": "PEER",
        "publicKey": STRANGER.signing.public_text,
        "encryptionPublicKey": STRANGER.encryption.public_text,
    }
    return json.dumps({name: value for name, value in {**keys, **changes}.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (reset(), "could not be fetched"),
        (truncate(), "could not be fetched"),
        (respond(404), "status 404"),
        (respond(500), "status 500"),
        (redirect("/elsewhere"), "status 307$"),
        (redirect("https://new.example/discover", 308), "status 308 and names https://new.example$"),
        (redirect(f"{OWN_URL}/discover", 308), "status 308$"),
        (respond(body=b"<html>"), "JSON"),
        (respond(body=b"[]"), "discover"),
        (respond(body=b"\xff"), "discover"),
        (respond(body=b"[" * 5000), "discover"),
        (respond(body=b" " * (256 * 1024 + 1)), "discover"),
        (respond(body=b" " * (1024 * 1024 + 1)), "could not be fetched"),
        (respond(body=document(publicKey=None)), "publicKey"),
        (respond(body=document(encryptionPublicKey=None)), "encryptionPublicKey"),
        (respond(body=document(publicKey="c2hvcnQ=")), "publicKey"),
        (respond(body=document(encryptionPublicKey=7)), "encryptionPublicKey"),
        (respond(body=document(url=None)), "url"),
        (respond(body=document(url="https://other.example")), "names another server"),
        (respond(body=document(url="nonsense")), "names another server"),
    ],
)
async def test_an_answer_that_is_no_discovery_document_registers_nobody(
    federation: Federation, peer: Peer, behaviour: Behaviour, reason: str
) -> None:
    """The error is one for another try later, and says what was wrong; nobody is introduced."""
    peer.server.upcoming.append(behaviour)
    with pytest.raises(DiscoveryError, match=reason):
        await federation.discovery(peer.url)
    assert await federation.registry.find(peer.url) is None
    assert len(peer.server.requests) == 1


async def test_a_server_that_is_down_is_a_discovery_error(federation: Federation, peer: Peer) -> None:
    """Nothing listens there."""
    await peer.server.stop()
    with pytest.raises(DiscoveryError, match="CONN_REFUSED"):
        await federation.discovery(peer.url)


async def test_a_server_known_with_another_signing_key_is_left_as_it_is(federation: Federation, peer: Peer) -> None:
    """It may have rotated unannounced, or be an impostor: the registered keys stay."""
    await acquaint(federation, peer)
    peer.keys = STRANGER
    with pytest.raises(DiscoveryError, match="another signing key"):
        await federation.discovery(peer.url)
    known = await federation.registry.find(peer.url)
    assert known is not None
    assert known.public_key == B.env["FEDERATION_PUBLIC_KEY"]
    assert peer.discoveries == ["GET", "GET"]  # the second says who asks: it might be changing its keys


async def test_a_key_registered_for_another_server_is_a_discovery_error(federation: Federation, peer: Peer) -> None:
    """The same node under a second name, or a thief of a public key, that does not prove to hold it."""
    await federation.registry.register(
        url="https://elsewhere.example",
        public_key=STRANGER.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )
    peer.pings = Pings.UNKNOWN
    with pytest.raises(DiscoveryError, match="registered for another server"):
        await federation.discovery(peer.url)
    assert await federation.registry.find(peer.url) is None


async def test_a_discovered_server_proves_its_keys_once_it_knows_us(federation: Federation, peer: Peer) -> None:
    """One ping, after the introduction; none when it is discovered again."""
    for _ in range(2):
        await federation.discovery(peer.url)

    assert peer.discoveries == ["GET", "REGISTER"] * 2
    assert len(peer.pinged) == 1
    assert await Claims(own_url=OWN_URL, ring=None, registry=federation.registry, fetch=federation.fetch).has_proved(
        peer.url
    )


async def test_a_squatter_does_not_hide_the_owner_of_its_keys(federation: Federation, peer: Peer) -> None:
    """The owner is registered in its place as soon as something is to be sent to it."""
    async with Squatter(peer) as squatter:
        await federation.discovery(squatter.url)

        assert (await federation.discovery(peer.url)).public_key == peer.keys.signing.public_text

        assert await federation.registry.find(squatter.url) is None
        with pytest.raises(DiscoveryError, match="registered for another server"):
            await federation.discovery(squatter.url)


async def test_who_cannot_open_what_is_sealed_to_its_key_is_not_registered(federation: Federation, peer: Peer) -> None:
    """It is gone again from the registry, and the delivery is not made."""
    async with Squatter(peer) as squatter:
        squatter.pretence = Pretence.CANNOT
        with pytest.raises(DiscoveryError, match="does not hold the keys"):
            await federation.discovery(squatter.url)
        assert await federation.registry.find(squatter.url) is None


async def test_our_own_keys_are_registered_for_nobody(federation: Federation, peer: Peer) -> None:
    """Nobody else has them, unless he is us by another name."""
    peer.keys = A.keys
    with capture_logs() as logs, pytest.raises(DiscoveryError, match="a key of this node"):
        await federation.discovery(peer.url)
    assert await federation.registry.find(peer.url) is None
    assert peer.discoveries == ["GET"]
    assert [(entry["event"], entry["held_by"]) for entry in logs] == [("keys_taken", OWN_URL)]


async def test_a_ping_that_hangs_is_no_answer(federation: Federation, peer: Peer) -> None:
    """It ends in its time, and while four are asked on one host a fifth is not."""
    possession = Possession(own_url=OWN_URL, fetch=federation.fetch)
    peer.server.unscripted = lambda _: hang()
    ask = partial(
        possession.ask,
        peer.url,
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
        timeout=timedelta(seconds=1),
    )
    pings = [asyncio.create_task(ask()) for _ in range(MAX_PINGS_PER_HOST + 1)]
    fifth = pings.pop()

    await asyncio.wait([fifth, *pings], return_when=asyncio.FIRST_COMPLETED)

    assert fifth.done()
    assert not any(ping.done() for ping in pings)
    assert await asyncio.gather(fifth, *pings) == [NO_PROOF] * (MAX_PINGS_PER_HOST + 1)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1", "http://[::1]:1", "http://169.254.169.254", "ftp://b.example", "nonsense", "http://u@b"]
)
async def test_a_url_the_guard_refuses_is_no_discovery_error(federation: Federation, url: str) -> None:
    """Trying again cannot help."""
    with pytest.raises(BlockedUrl):
        await federation.discovery(url)


@pytest.mark.parametrize(
    ("behaviour", "event"),
    [
        (respond(400, body=b'{"error":"no"}'), "register_refused"),
        (respond(500), "register_refused"),
        (reset(), "register_failed"),
    ],
)
async def test_a_registration_that_fails_is_only_logged(
    federation: Federation, peer: Peer, behaviour: Behaviour, event: str
) -> None:
    """We know the server, it does not know us yet."""
    discover = peer.server.routes["/discover"]
    peer.server.upcoming += [discover, behaviour, behaviour]  # a request on a used connection may be repeated once
    with capture_logs() as logs:
        assert (await federation.discovery(peer.url)).url == peer.url
    assert event in [entry["event"] for entry in logs]
    assert peer.senders == {}


async def test_a_network_failure_of_the_registration_marks_the_server(federation: Federation, peer: Peer) -> None:
    """It was registered a moment ago, so its health is on record."""
    peer.server.upcoming += [peer.server.routes["/discover"], reset(), reset()]
    found = await federation.discovery(peer.url)
    assert (found.is_healthy, found.unhealthy_reason) == (False, "CONN_RESET")


async def test_a_node_without_keys_discovers_and_does_not_introduce_itself(
    make_settings: MakeSettings, peer: Peer
) -> None:
    """There is nothing to register."""
    nameless = Federation(make_settings(better_auth_url=None, **dict.fromkeys(map(str.lower, A.env))))
    try:
        assert (await nameless.discovery(peer.url)).url == peer.url
    finally:
        await nameless.close()
    assert peer.discoveries == ["GET"]


async def test_nobody_waiting_any_more_is_no_complaint(federation: Federation, peer: Peer) -> None:
    """The last caller gives up, the discovery fails later: asyncio has nothing to report."""
    peer.server.upcoming.append(hang())
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    caller = asyncio.create_task(federation.discovery(peer.url))
    await until(lambda: peer.server.requests)
    caller.cancel()
    await asyncio.wait([caller])
    await peer.server.stop()
    if unfinished := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(unfinished)
    assert complaints == []
