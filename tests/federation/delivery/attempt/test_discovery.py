"""A delivery to a server that is not known yet."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, update
from sqlmodel import col

from db import DeliveryState, HoldReason, LinkState, Server, ServerLink
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.sealed.peers.discovery import DISCOVERY_TIMEOUT
from tests.federation.delivery.harness import Site, follow_payload, job_data
from tests.federation.protocol.vectors import B
from tests.misbehaving import Exchange, Received, hang, respond, respond_with
from tests.patience import PATIENCE_SECONDS
from tests.peer import DISCOVER_PATH, FOLLOWS_PATH, Peer, Pings, acquaint, introduce, json_answer
from workers import JobState
from workers.worker.events import WorkerEventKind

OTHER = generate_own_keys()
SHORT_KEY = "AAAA"


@pytest.fixture
async def site(federation: Federation) -> AsyncIterator[Site]:
    """A site that knows nobody."""
    async with Site(federation) as running:
        yield running


def show(peer: Peer, changes: Mapping[str, object]) -> None:
    """The peer's `/discover` shows changed members; None takes one out."""
    document = {name: value for name, value in {**peer.document(), **changes}.items() if value is not None}
    peer.server.routes[DISCOVER_PATH] = respond_with(lambda _: json_answer(document))


async def test_an_unknown_server_is_discovered_first(site: Site, peer: Peer) -> None:
    """Its keys are fetched, we introduce ourselves, and the very first attempt is delivered and verified."""
    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)
    assert peer.discoveries == ["GET", "REGISTER"]
    assert peer.senders.keys() == {"https://a.example"}
    assert len(peer.applied) == 1
    server = await site.server(peer.url)
    assert server is not None
    assert server.public_key == peer.keys.signing.public_text
    assert server.encryption_public_key == peer.keys.encryption.public_text
    assert server.is_healthy


async def test_a_burst_discovers_once(site: Site, peer: Peer) -> None:
    """Many deliveries to one unknown server share one discovery."""
    deliveries = await site.owe_posts(peer, 12)

    await site.ended(*deliveries)

    assert peer.discoveries == ["GET", "REGISTER"]
    assert len(peer.applied) == 12


async def test_a_follow_to_an_unknown_server_is_verified_with_the_discovered_key(site: Site, peer: Peer) -> None:
    """The acknowledgment is read with the key discovery has just stored; without a follow of ours it is ignored."""
    data = job_data("row-1", peer.url, payload=follow_payload("follow-1"), path=FOLLOWS_PATH)

    fate = await site.outcome(await site.owe_raw(data, name="deliver-follow", row="row-1"), row="row-1")

    assert (fate.state, fate.job.attempt, fate.row, fate.codes) == (JobState.COMPLETED, 1, None, [None])


async def test_a_follow_is_not_acknowledged_by_a_server_that_is_no_longer_registered(site: Site, peer: Peer) -> None:
    """Without a key its acknowledgment proves nothing: one attempt, and the row stays, failed."""

    async def removed_meanwhile(request: Received, exchange: Exchange) -> None:
        async with site.federation.database.transaction() as session:
            await session.execute(delete(Server).where(col(Server.url) == peer.url))
        await peer.server.default(request, exchange)

    peer.server.routes[FOLLOWS_PATH] = removed_meanwhile
    data = job_data("row-1", peer.url, payload=follow_payload("follow-1"), path=FOLLOWS_PATH)

    fate = await site.outcome(await site.owe_raw(data, name="deliver-follow", row="row-1"), row="row-1")

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 1, ["NO_PUBLIC_KEY"])
    assert fate.row is not None
    assert (fate.row.state, fate.row.error_code) == (DeliveryState.FAILED, "NO_PUBLIC_KEY")
    assert "no longer registered" in fate.reason


async def test_a_refused_introduction_does_not_matter(site: Site, peer: Peer) -> None:
    """The peer knows us already and refuses our REGISTER: the delivery goes on."""
    introduce(peer, "https://a.example")
    document = json_answer(peer.document())
    peer.server.routes[DISCOVER_PATH] = respond_with(
        lambda request: document if request.method == "GET" else json_answer({"error": "no"}, status=400)
    )

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt) == (JobState.COMPLETED, 1)


async def test_an_introduction_that_hangs_delays_nothing_for_long_and_harms_nobody(site: Site, peer: Peer) -> None:
    """The first delivery arrives long before it is given up, and the server is healthy when it breaks off at last."""
    introduce(peer, "https://a.example")
    document, delivered = json_answer(peer.document()), asyncio.Event()

    async def show_or_hang(request: Received, exchange: Exchange) -> None:
        if request.method == "GET":
            await respond_with(lambda _: document)(request, exchange)
        else:
            await delivered.wait()
            exchange.reset()

    peer.server.routes[DISCOVER_PATH] = show_or_hang

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job and fate.job.attempt) == (JobState.COMPLETED, 1)
    assert fate.log[0].duration_ms < DISCOVERY_TIMEOUT / timedelta(milliseconds=1)
    delivered.set()
    await asyncio.gather(*site.federation.discovery._introducing)
    server = await site.server(peer.url)
    assert server is not None
    assert server.is_healthy


@pytest.mark.parametrize(
    "changes",
    [
        {"publicKey": None},
        {"encryptionPublicKey": None},
        {"publicKey": SHORT_KEY},
        {"encryptionPublicKey": SHORT_KEY},
        {"publicKey": 7},
        {"encryptionPublicKey": B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"] + "=junk"},
        {"url": "https://someone-else.example"},
        {"url": None},
    ],
    ids=lambda changes: "-".join(f"{name}:{str(value)[:6]}" for name, value in changes.items()),
)
async def test_unusable_keys_are_not_registered(site: Site, peer: Peer, changes: Mapping[str, object]) -> None:
    """Missing, short or foreign keys fail each attempt, and so the delivery; nobody is registered, nothing sent."""
    show(peer, changes)

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 5, ["DISCOVERY_REFUSED"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.outcome, fate.row.attempts) == (DeliveryState.FAILED, "retryable", 5)
    assert f"{peer.url}/discover" in fate.reason
    assert await site.server(peer.url) is None
    assert peer.deliveries == []


async def test_rotated_keys_do_not_replace_the_registered_ones(site: Site, peer: Peer, federation: Federation) -> None:
    """A server that shows another signing key than the registered one is refused, and its row stays as it was."""
    await acquaint(federation, peer)
    show(peer, {"publicKey": OTHER.signing.public_text})

    with pytest.raises(Exception, match="another signing key"):
        await federation.discovery(peer.url)

    server = await site.server(peer.url)
    assert server is not None
    assert server.public_key == peer.keys.signing.public_text
    assert peer.discoveries == ["GET"] * 2  # the second in our name


async def test_keys_of_another_server_are_refused(site: Site, peer: Peer, federation: Federation) -> None:
    """A stranger that shows a known server's keys is not registered, and its delivery fails after all its attempts."""
    peer.pings = Pings.UNKNOWN
    await federation.registry.register(
        url="https://known.example",
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (JobState.FAILED, ["DISCOVERY_REFUSED"] * 5)
    assert await site.server(peer.url) is None


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (200, "FOREIGN_ANSWER"),
        (204, "FOREIGN_ANSWER"),
        (301, "DISCOVERY"),
        (403, "FOREIGN_ANSWER"),
        (404, "FOREIGN_ANSWER"),
        (408, "DISCOVERY"),
        (425, "DISCOVERY"),
        (500, "DISCOVERY"),
        (503, "DISCOVERY"),
    ],
)
async def test_a_discovery_that_fails_is_tried_again(site: Site, peer: Peer, status: int, code: str) -> None:
    """Once `/discover` answers, so does the delivery; whether the server could judge is on record."""
    peer.server.upcoming += [respond(status, body=b"")]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 2, None)
    assert fate.codes == [code, None]


async def test_a_document_may_come_compressed(site: Site, peer: Peer) -> None:
    """Whoever stands before the server compresses what it was not asked to."""
    document = gzip.compress(json_answer(peer.document()).body)
    peer.server.upcoming += [respond(200, {"Content-Encoding": "gzip"}, document)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt) == (JobState.COMPLETED, 1)


async def test_a_document_that_cannot_be_inflated_says_why(site: Site, peer: Peer) -> None:
    """The encoding is named where the operator looks."""
    peer.server.upcoming += [respond(200, {"Content-Encoding": "br"}, b"\x8b")] * 5

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.row is not None
    assert "/discover: not UTF-8" in (fate.row.last_error or "")
    assert (fate.row.last_error or "").endswith("(its Content-Encoding, which we did not ask for: br)")


async def test_a_page_at_the_discovery_of_an_unknown_server_fails_its_deliveries_after_a_day(
    site: Site, peer: Peer
) -> None:
    """Until then it is a proxy's whose server is away; whoever mistyped a name need not wait a week."""
    peer.server.routes[DISCOVER_PATH] = respond(404, body=b"<p>This domain is for sale</p>")
    delivery = await site.owe_post(peer)
    fate = await site.outcome(delivery)
    assert (fate.state, fate.codes) == (None, ["FOREIGN_ANSWER"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)

    for series, (hours, code) in enumerate([(23, "FOREIGN_ANSWER"), (25, "DISCOVERY_REFUSED")], 1):
        since = update(ServerLink).values(since=datetime.now(UTC) - timedelta(hours=hours))
        async with site.federation.database.transaction() as session:
            await session.execute(since)
        site.federation.links.forget(peer.url)
        await site.federation.link_probes.look(await site.federation.links.find(peer.url))
        fate = await site.outcome(f"{delivery}.{series}", row=delivery)
        assert fate.codes[-1] == code
    assert fate.row is not None
    assert (fate.row.state, "is the name right?" in str(fate.row.last_error)) == (DeliveryState.FAILED, True)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_asks_for_a_pause_at_its_discovery_rests(site: Site, peer: Peer, status: int) -> None:
    """The delivery is held as long, and nobody looks at `/discover` meanwhile for another one's sake."""
    peer.server.upcoming += [respond(status, {"Retry-After": "3600"}, body=b"")]

    fate = await site.outcome(await site.owe_post(peer))
    later = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes, later.state, later.log) == (None, ["HTTP_429"], None, [])
    link = await site.federation.links.find(peer.url)
    for row in (fate.row, later.row):
        assert row is not None
        assert (row.state, row.held_reason) == (DeliveryState.HELD, HoldReason.REST)
        assert row.next_attempt_at == link.rest_until
    assert (link.state, link.evidence) == (LinkState.UP, 0)
    assert len(peer.server.requests) == 1


async def test_a_cancelled_attempt_leaves_the_discovery_to_the_others(site: Site, peer: Peer) -> None:
    """One delivery's end does not fail another one that waits for the same server."""
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def pause(request: Received, exchange: Exchange) -> None:
        asked.set()
        await go_on.wait()
        await respond_with(lambda _: json_answer(peer.document()))(request, exchange)

    peer.server.upcoming += [pause]
    discovery = site.federation.discovery
    first = asyncio.create_task(discovery(peer.url))
    second = asyncio.create_task(discovery(peer.url))
    await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
    first.cancel()
    go_on.set()

    assert (await second).url == peer.url
    assert peer.discoveries == ["GET", "REGISTER"]


async def test_a_name_that_leads_nowhere_is_tried_again(site: Site) -> None:
    """A host that does not resolve may resolve later: every attempt is used, and the delivery held."""
    data = job_data("row-1", "http://nowhere.invalid", payload=follow_payload("follow-1"))

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.state, fate.codes) == (None, ["DISCOVERY"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert "DNS_BLOCKED" in (fate.row.last_error or "")


async def test_a_hanging_discovery_gives_way_to_a_stop(site: Site, peer: Peer) -> None:
    """A worker that stops while a server keeps its discovery waiting gives the job back, uncounted."""
    peer.server.upcoming += [hang()]
    delivery = await site.owe_post(peer)
    site.start()
    await site.until(lambda: any(event.kind is WorkerEventKind.ACTIVE for event in site.events))

    await site.stop(skip_grace=True)

    fate = await site.fate(delivery)
    assert (fate.state, fate.job.attempt, fate.log) == (JobState.QUEUED, 0, [])
