"""A post's acknowledgment: looked at, told to the log where it is not the server's, and good enough in any case."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import trustme
from structlog.testing import capture_logs

from db import AttemptNote, AttemptOutcome
from federation.base.settings.settings import Settings
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.protocol.acks import ack_response, find_ack, post_ack
from federation.runtime.composition import Federation
from federation.sealed.outbound.answers import post_ack_mismatch
from tests.federation.delivery.attempt.test_acks import ACCEPTABLE, UNPROVEN
from tests.federation.delivery.harness import Fate, Site, follow_payload, job_data, post_payload
from tests.federation.protocol.vectors import A, B
from tests.peer import Peer, Render, acquaint, both, json_answer
from workers import JobState

Plaintext = dict[str, Any]


def saying(change: Callable[[Plaintext], object]) -> Render:
    """An acknowledgment that is sealed and signed as it should be, of a plaintext that `change` has altered."""

    def plaintext(text: str) -> str:
        altered = json.loads(text)
        change(altered)
        return json.dumps(altered)

    return lambda answer: json_answer(answer.ack(plaintext=plaintext(answer.plaintext)))


MISMATCHES: dict[str, tuple[Render, str]] = {
    "bare": (lambda _: json_answer({"method": "PROXY_RESPONSE", "status": "acknowledged"}), "data"),
    "no-data": (UNPROVEN["no-data"][0], "data"),
    "data-no-envelope": (UNPROVEN["data-no-envelope"][0], "data"),
    "wrong-key": (UNPROVEN["wrong-key"][0], "data"),
    "no-signature": (UNPROVEN["no-signature"][0], "signature"),
    "bad-signature": (UNPROVEN["bad-signature"][0], "signature"),
    "wrong-signer": (UNPROVEN["wrong-signer"][0], "signature"),
    "not-json": (UNPROVEN["bad-inner-not-json"][0], "content"),
    "a-follow's": (UNPROVEN["bad-inner-shape"][0], "content"),
    "another-post": (saying(lambda said: said["post"].update(federationPostId="another")), "post"),
    "another-server": (saying(lambda said: said.update(federationUrl="https://c.example")), "server"),
    "no-server": (saying(lambda said: said.update(federationUrl="c.example")), "server"),
}
MATCHES: dict[str, Render] = {
    **ACCEPTABLE,
    "spelled-otherwise": saying(lambda said: said.update(federationUrl=said["federationUrl"] + "/")),
}


async def delivered(site: Site, peer: Peer, render: Render) -> tuple[Fate, list[MutableMapping[str, Any]]]:
    """What became of a post that was acknowledged in this way, and what the log says of its acknowledgment."""
    peer.render = render
    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_post(peer))
    return fate, [entry for entry in logs if entry["event"] == "post_ack_mismatch"]


@pytest.mark.parametrize("shape", MISMATCHES)
async def test_a_mismatch_is_logged(site: Site, peer: Peer, shape: str) -> None:
    """The post is delivered at its first attempt; one line says of which delivery what does not match, and no more."""
    render, mismatch = MISMATCHES[shape]

    fate, logged = await delivered(site, peer, render)

    assert (fate.state, fate.row, fate.codes) == (JobState.COMPLETED, None, [None])
    delivery_id = fate.log[0].delivery_id
    told = {"server_url": peer.url, "delivery_id": delivery_id, "mismatch": mismatch}
    assert logged == [{"event": "post_ack_mismatch", "log_level": "warning", **told}]


@pytest.fixture
async def quiet(federation: Federation, peer: Peer) -> AsyncIterator[Site]:
    """A site at which chance never asks for a check, and whose peer was checked since its link was made."""
    await acquaint(federation, peer)
    async with Site(federation, chance=lambda: False) as running:
        for _ in range(2):
            assert (await delivered(running, peer, both))[1] == []
        yield running


async def noted(site: Site, peer: Peer, render: Render) -> AttemptNote | None:
    """What the record of a post's only attempt has beside that it was delivered."""
    fate, logged = await delivered(site, peer, render)
    (attempt,) = fate.log
    assert attempt.outcome is AttemptOutcome.DELIVERED
    assert bool(logged) or attempt.note is None
    return attempt.note


FORGED = MISMATCHES["wrong-signer"][0]
BARE = MISMATCHES["bare"][0]


@pytest.mark.parametrize("shape", sorted(MISMATCHES.keys() - {"bare", "no-data", "no-signature"}))
async def test_who_forges_is_on_record(site: Site, peer: Peer, shape: str) -> None:
    """The post counts as delivered, as the attempt's row and its line in the log say with a note."""
    peer.render = MISMATCHES[shape][0]
    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_post(peer))

    assert [(attempt.outcome, attempt.note) for attempt in fate.log] == [("delivered", "forged_ack")]
    assert [entry["note"] for entry in logs if entry["event"] == "delivery_attempt"] == ["forged_ack"]


async def test_an_honest_server_has_no_note(site: Site, peer: Peer) -> None:
    """Neither in the row nor in the log."""
    peer.render = both
    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_post(peer))

    assert [attempt.note for attempt in fate.log] == [None]
    assert [entry["note"] for entry in logs if entry["event"] == "delivery_attempt"] == [None]


async def test_most_are_not_looked_at(quiet: Site, peer: Peer) -> None:
    """Opening all of them would cost a third of a delivery."""
    assert [(await delivered(quiet, peer, FORGED))[1] for _ in range(3)] == [[], [], []]


async def test_some_are_looked_at_by_chance(federation: Federation, peer: Peer) -> None:
    """Whoever answers as the server did, over the same connection, is found out in the end."""
    await acquaint(federation, peer)
    drawn = iter([False, False, True])
    async with Site(federation, chance=lambda: next(drawn)) as site:
        for _ in range(2):
            assert await noted(site, peer, both) is None
        assert [await noted(site, peer, FORGED) for _ in range(3)] == [None, None, AttemptNote.FORGED_ACK]


async def test_after_a_change_of_the_link_the_first_is_looked_at(quiet: Site, peer: Peer) -> None:
    """A server that was away may be another one now."""
    links = quiet.federation.links
    await links.hold(peer.url)
    await links.release(peer.url)
    assert await noted(quiet, peer, FORGED) is AttemptNote.FORGED_ACK


def closing(render: Render) -> Render:
    """The next delivery needs another connection."""
    return lambda answer: replace(render(answer), headers={"Connection": "close"})


async def test_from_behind_another_certificate_the_first_is_looked_at(settings: Settings) -> None:
    """It may be another server; the certificates that have proved themselves are known."""
    authority, theirs, ours = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.configure_trust(ours)
    first, second = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    guard = AddressGuard(settings.dev_allowed_hostnames)
    federation = Federation(settings, client=FederationClient(guard, ConnectionPool(guard, ssl_context=ours)))
    first.configure_cert(theirs)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(federation.close)
        peer = await stack.enter_async_context(Peer(ssl_context=theirs))
        await acquaint(federation, peer)
        async with Site(federation, chance=lambda: False) as site:
            notes = [await noted(site, peer, closing(render)) for render in (both, both, FORGED)]
            second.configure_cert(theirs)
            notes += [await noted(site, peer, closing(render)) for render in (FORGED, both, FORGED)]
    assert notes == [None, None, None, AttemptNote.FORGED_ACK, None, None]


async def test_after_a_forged_one_all_are_looked_at(quiet: Site, peer: Peer) -> None:
    """Until the server is back."""
    links = quiet.federation.links
    await links.hold(peer.url)
    await links.release(peer.url)
    notes = [await noted(quiet, peer, render) for render in (FORGED, FORGED, FORGED, both, FORGED)]
    assert notes == [AttemptNote.FORGED_ACK] * 3 + [None, None]


async def test_an_absent_proof_of_a_server_that_signs_is_always_seen(quiet: Site, peer: Peer) -> None:
    """To see that there is nothing costs nothing."""
    assert await noted(quiet, peer, BARE) is AttemptNote.FORGED_ACK


async def test_a_server_that_never_signed_forges_nothing(site: Site, peer: Peer) -> None:
    """The log tells of it, and the record does not accuse."""
    fate, logged = await delivered(site, peer, BARE)
    assert [attempt.note for attempt in fate.log] == [None]
    assert [entry["mismatch"] for entry in logged] == ["data"]


@pytest.mark.parametrize("shape", MATCHES)
async def test_the_servers_own_word_is_not_logged(site: Site, peer: Peer, shape: str) -> None:
    """Wherever it sits in the answer, and however the server spells itself."""
    fate, logged = await delivered(site, peer, MATCHES[shape])

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert logged == []


def test_without_a_key_nothing_can_be_checked() -> None:
    """The server is no longer registered here when it answers."""
    text = post_ack(own_url="https://b.example", post_id="theirs", federation_post_id="ours")
    found = find_ack(ack_response(text, recipient_key=A.keys.encryption.public, signing_secret=B.keys.signing.secret))

    def mismatch(key: str | None) -> str | None:
        payload = post_payload("ours")
        return post_ack_mismatch(found, "https://b.example", payload=payload, keys=A.keys, public_key=key)

    assert mismatch(B.keys.signing.public_text) is None
    assert mismatch(None) == "key"


async def test_what_cannot_be_looked_at_is_a_mismatch(site: Site, peer: Peer) -> None:
    """Another producer's job is named as a post's and has none: whatever its acknowledgment says, it is delivered."""
    text = post_ack(own_url=peer.url, post_id="theirs", federation_post_id="ours")
    peer.render = lambda answer: json_answer(answer.ack(plaintext=text))
    data = job_data("row-1", peer.url, payload=follow_payload("follow-1"))

    with capture_logs() as logs:
        fate = await site.outcome(await site.owe_raw(data))

    assert fate.state is JobState.COMPLETED
    assert [entry["mismatch"] for entry in logs if entry["event"] == "post_ack_mismatch"] == ["PayloadError"]
