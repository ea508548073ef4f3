"""The registry at an administrator's hand, with a peer that answers; and what is said of servers that do not."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlmodel import col

from db import AcceptedKey, Follow, LinkState, Server, ServerLink, ServerScorecard
from federation.admin import blacklist
from federation.admin.servers import servers
from federation.admin.why import explain
from federation.base.queues.job_data import POST_JOB
from federation.protocol.errors import UrlError
from federation.runtime.composition import Federation
from federation.sealed.peers.registry import KnownServer
from tests.federation.admin.conftest import PAYLOAD
from tests.misbehaving import respond
from tests.peer import Peer, acquaint


async def row_of(node: Federation, url: str) -> servers.ServerRow:
    row = await servers.show(node.database, url)
    assert row is not None
    return row


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("peer.example", "https://peer.example"),
        ("HTTP://Peer.example:80/x", "http://peer.example"),
        ("peer.example:8443", "https://peer.example:8443"),
    ],
)
def test_a_server_may_be_named_by_its_host(text: str, url: str) -> None:
    """As a tired operator types it."""
    assert servers.server_url(text) == url


def test_what_names_no_server_is_refused() -> None:
    with pytest.raises(UrlError):
        servers.server_url("no server")


async def test_a_look_heals_a_server_that_is_well(federation: Federation, peer: Peer) -> None:
    """And one that fails changes nothing: the planned probes go on as they were."""
    await acquaint(federation, peer)
    await federation.registry.mark_unhealthy(peer.url, "TIMEOUT")
    peer.server.routes["/discover"], answer = respond(500), peer.server.routes["/discover"]
    before = await row_of(federation, peer.url)
    assert "status 500" in str(await servers.probe(federation, before))
    assert await row_of(federation, peer.url) == before

    peer.server.routes["/discover"] = answer
    assert await servers.probe(federation, before) is None
    assert (await row_of(federation, peer.url)).is_healthy


async def test_a_blacklisted_server_is_not_looked_at(federation: Federation, peer: Peer) -> None:
    """Not even by an administrator: it hears nothing of us."""
    await acquaint(federation, peer)
    row = await row_of(federation, peer.url)
    await blacklist.add(federation.database, peer.url, reason="spam")
    federation.registry.forget(peer.url)
    assert "blacklisted" in str(await servers.probe(federation, row))
    assert peer.discoveries == []


async def test_forgetting_a_server_takes_its_follows(federation: Federation, peer: Peer) -> None:
    """They are counted first; others stay."""
    await acquaint(federation, peer)
    now = datetime.now(UTC)
    async with federation.database.transaction() as session:
        for number, url in enumerate((peer.url, peer.url, None)):
            follow = Follow(follower_id=f"a{number}", following_id="b", created_at=now, follower_server_url=url)
            session.add(follow)
    assert await servers.count_follows(federation.database, peer.url) == 2
    assert [await servers.forget(federation.database, peer.url) for _ in range(2)] == [True, False]
    async with federation.database.read() as session:
        assert (await session.execute(select(col(Follow.follower_id)))).scalars().all() == ["a2"]


async def test_accepted_keys_are_those_that_the_registry_has(federation: Federation, peer: Peer) -> None:
    """By their fingerprints, as the analytics have them; repeating it is fine, and so is a malformed key."""
    assert await servers.accept_key(federation.database, peer.url) is False
    await acquaint(federation, peer)
    row = await row_of(federation, peer.url)
    wanted = {hashlib.sha256(base64.b64decode(key)).hexdigest() for key in (row.public_key, row.encryption_public_key)}
    assert [await servers.accept_key(federation.database, peer.url) for _ in range(2)] == [True, True]
    async with federation.database.transaction() as session:
        found = (await session.execute(select(AcceptedKey))).scalars().all()
        assert {(each.server_url, each.fingerprint) for each in found} == {(peer.url, each) for each in wanted}
        await session.execute(update(Server).values(public_key="malformed"))
    assert await servers.accept_key(federation.database, peer.url)


async def test_servers_come_in_pages(federation: Federation) -> None:
    """By URL, each once."""
    for number in range(5):
        await federation.registry.register(
            url=f"https://{number}.example", public_key=f"p{number}", encryption_public_key=f"e{number}"
        )
    seen: list[str] = []
    after = None
    while True:
        page = await servers.list_servers(federation.database, limit=2, after=after)
        seen += [server.url for server in page.servers]
        if (after := page.after) is None:
            break
    assert seen == [f"https://{number}.example" for number in range(5)]


async def test_the_next_probe_of_a_long_outage_is_the_schedulers(federation: Federation, peer: Peer) -> None:
    """Its date is the plan's; where a failure forbids direct probes, too."""
    await acquaint(federation, peer)
    for code, failed in (("TIMEOUT", 7), ("DNS_BLOCKED", 0)):
        await federation.registry.mark_unhealthy(peer.url, code)
        seen_at = datetime.now(UTC) - timedelta(minutes=1)
        async with federation.database.transaction() as session:
            values = {"health_check_attempts": failed, "updated_at": seen_at}
            await session.execute(update(Server).where(col(Server.url) == peer.url).values(values))
        explanation = await explain(federation, peer.url)
        known = KnownServer(
            url=peer.url,
            public_key="",
            encryption_public_key="",
            is_healthy=False,
            health_check_attempts=failed,
            unhealthy_reason=code,
            created_at=seen_at,
        )
        assert explanation.next_probe is not None
        assert explanation.next_probe.at == federation.probe_plan.due_at(known, seen_at)
        assert not explanation.next_probe.queued
        assert any("is the scheduler's" in sentence for sentence in explanation.sentences())


async def test_what_the_analytics_say_of_a_server_is_told(federation: Federation) -> None:
    """The scorecard of seven days, with its advice and reasons; nothing where there is none."""
    url = "https://judged.example"
    async with federation.database.transaction() as session:
        session.add(
            ServerScorecard(
                server_url=url,
                window_days=7,
                as_of=datetime(2026, 1, 2, tzinfo=UTC).date(),
                generation=1,
                attempts=10,
                delivered=4,
                score=43.2,
                trend="worsening",
                action="watch",
                reasons=["under 90 % delivered"],
            )
        )
    cards = await servers.scorecards(federation.database, [url, "https://unjudged.example"])
    assert list(cards) == [url]
    told = list((await explain(federation, url)).sentences())
    assert "Its score of the 7 days up to 2026-01-02 is 43 of 100; advice: watch: under 90 % delivered." in told
    assert not any("score" in each for each in (await explain(federation, "https://unjudged.example")).sentences())


async def test_a_look_that_finds_a_server_well_brings_its_link_up(federation: Federation, peer: Peer) -> None:
    """But where something is held: that has to get through, and one delivery is sent ahead now."""
    await acquaint(federation, peer)
    await federation.links.exhausted(peer.url, "TIMEOUT", first_attempted_at=datetime.now(UTC))
    assert await servers.probe(federation, await row_of(federation, peer.url)) is None
    assert (await federation.links.find(peer.url)).state is LinkState.UP

    await federation.links.exhausted(peer.url, "TIMEOUT", first_attempted_at=datetime.now(UTC))
    async with federation.outbox.transaction() as session:
        held = await federation.outbox.enqueue_delivery(session, POST_JOB, f"{peer.url}/posts", peer.url, PAYLOAD)
    assert await servers.probe(federation, await row_of(federation, peer.url)) is None
    link = await federation.links.find(peer.url)
    assert (link.state, link.probes) == (LinkState.DOWN, 0)
    await federation.delivery_queue.start()
    assert await federation.delivery_queue.get_status(f"{held}.1") is not None


async def test_links_are_told_with_what_is_held(federation: Federation) -> None:
    """A server that nobody knows is up since no time; a pause that is over is none."""
    url, unknown = "https://held.example", "https://unknown.example"
    now = datetime.now(UTC)
    await federation.links.hold(url)
    async with federation.outbox.transaction() as session:
        await federation.outbox.enqueue_delivery(session, POST_JOB, f"{url}/posts", url, PAYLOAD)
    async with federation.database.transaction() as session:
        await session.execute(update(ServerLink).values(rest_until=now - timedelta(hours=1)))
    links = await servers.links(federation.database, [url, unknown])
    assert (links[url].held, links[url].operator_hold, links[url].rest_until) == (1, True, None)
    assert (links[unknown].state, links[unknown].since, links[unknown].held) == (LinkState.UP, None, 0)
