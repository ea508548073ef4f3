"""Deliveries to blacklisted servers: however the rule and the job spell the server, nothing is sent to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from db import BlacklistedServer, Database
from federation.admin import blacklist
from federation.runtime.composition import Federation
from federation.sealed.peers.registry import KnownServer
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.misbehaving import Exchange, Received
from tests.patience import eventually
from tests.peer import DISCOVER_PATH, POSTS_PATH, Peer, acquaint
from workers import JobState


async def test_a_backlog_of_a_blacklisted_server_fails_without_a_request(site: Site, peer: Peer) -> None:
    """What was queued before the rule goes, rows and all, and the peer hears nothing of it."""
    deliveries = await site.owe_posts(peer, 20)
    await blacklist.add(site.federation.database, peer.url, reason="spam")

    await site.ended(*deliveries)

    fates = [await site.fate(delivery) for delivery in deliveries]
    assert {(fate.state, fate.job.attempt, fate.row) for fate in fates} == {(JobState.FAILED, 1, None)}
    assert [fate.codes for fate in fates] == [["BLACKLISTED"]] * 20
    assert peer.server.connections == 0


async def test_a_running_worker_sees_a_rule_of_another_process(federation: Federation, site: Site, peer: Peer) -> None:
    """Deliveries get through; a rule made over another connection stops them, its removal lets them through again."""
    assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED
    elsewhere = Database(federation.settings.database_url.get_secret_value())
    await blacklist.add(elsewhere, peer.url, reason="spam")
    await _until_posts_end(site, peer, JobState.FAILED)
    heard = len(peer.server.requests)
    for delivery in await site.owe_posts(peer, 5):
        assert (await site.outcome(delivery)).codes == ["BLACKLISTED"]
    assert len(peer.server.requests) == heard
    await blacklist.remove(elsewhere, peer.url)
    await _until_posts_end(site, peer, JobState.COMPLETED)
    await elsewhere.close()


async def _until_posts_end(site: Site, peer: Peer, state: JobState) -> None:
    async def new_post() -> JobState:
        return (await site.outcome(await site.owe_post(peer))).state

    await eventually(new_post, lambda found: found is state)


@pytest.mark.parametrize("rule", ["*.127.0.0.1", "HTTP://127.1:{port}/"])
async def test_a_rule_in_another_form_stops_the_delivery(site: Site, peer: Peer, rule: str) -> None:
    """A star covers every port of an address; an origin means the same server in any spelling."""
    await blacklist.add(site.federation.database, rule.format(port=peer.server.port), reason="spam")

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.codes, fate.row, peer.server.connections) == (["BLACKLISTED"], None, 0)


async def test_a_job_that_spells_the_server_otherwise_is_stopped(site: Site, peer: Peer) -> None:
    """As a Node producer may: it writes what it was given."""
    await blacklist.add(site.federation.database, peer.url, reason="spam")
    url = f"HTTP://127.0.0.1:{peer.server.port}/"
    data = job_data("row-1", url, payload=post_payload("post-1"))

    fate = await site.outcome(await site.owe_raw(data, row="row-1"), row="row-1")

    assert (fate.codes, fate.row, peer.server.connections) == (["BLACKLISTED"], None, 0)


async def test_a_blacklisted_target_of_another_servers_job_is_stopped(site: Site, peer: Peer) -> None:
    """The job names a server that is welcome, and a target that is not."""
    await blacklist.add(site.federation.database, peer.url, reason="spam")
    data = job_data("row-1", "https://good.example", payload=post_payload("post-1"))

    fate = await site.outcome(
        await site.owe_raw({**data, "targetUrl": peer.url + POSTS_PATH}, row="row-1"), row="row-1"
    )

    assert (fate.codes, fate.row, peer.server.connections) == (["BLACKLISTED"], None, 0)


async def test_a_rule_made_while_a_server_is_discovered_stops_the_delivery(federation: Federation, peer: Peer) -> None:
    """The discovery was under way; what it was for is not sent."""

    async def block_then_answer(request: Received, exchange: Exchange) -> None:
        await blacklist.add(federation.database, peer.url, reason="spam")
        federation.blacklist.recheck()
        await answer(request, exchange)

    answer = peer.server.routes[DISCOVER_PATH]
    peer.server.upcoming.append(block_then_answer)
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))

    assert fate.codes == ["BLACKLISTED"]
    assert peer.deliveries == []


async def test_a_rule_made_before_a_server_is_asked_for_its_keys_is_no_fault_of_the_server(
    federation: Federation, peer: Peer
) -> None:
    """Nobody was asked, so nobody failed to answer: the delivery is over, and others that wait are not sent away."""

    class Forbidden:
        async def __call__(self, server_url: str) -> KnownServer:
            await blacklist.add(federation.database, peer.url, reason="spam")
            federation.blacklist.recheck()
            return await federation.discovery(server_url)

        async def until_introduced(self, server_url: str) -> None:
            """Nothing is under way."""

    async with Site(federation, discover=Forbidden()) as site:
        fate = await site.outcome(await site.owe_post(peer))
    async with federation.host_limits.turn(peer.url, size=1, leave_slot=lambda: True) as turn:
        assert turn.first_byte is None

    assert (fate.codes, fate.row, peer.server.connections) == (["BLACKLISTED"], None, 0)


async def test_an_expired_rule_stops_nothing(site: Site, peer: Peer) -> None:
    """It is still in the table."""
    past = datetime(2025, 1, 1, tzinfo=UTC)
    async with site.federation.database.transaction() as session:
        session.add(BlacklistedServer(server_url=peer.url, reason="r", created_at=past, expires_at=past))

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (JobState.COMPLETED, [None])


async def test_an_unread_blacklist_delivers_nothing(federation: Federation, peer: Peer) -> None:
    """Rules that were never read might name this server: nothing is sent, and the job comes back, uncounted."""
    await acquaint(federation, peer)
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
        async with _unreadable(federation.database):
            site.start()
            await site.until(lambda: site.failing)
            assert peer.server.connections == 0
        fate = await site.outcome(delivery)

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.COMPLETED, 1, [None])


@asynccontextmanager
async def _unreadable(database: Database) -> AsyncIterator[None]:
    """Meanwhile the blacklist cannot be read, and all else can."""
    await _rename(database, "blacklist_revision", "gone")
    yield
    await _rename(database, "gone", "blacklist_revision")


async def _rename(database: Database, table: str, name: str) -> None:
    async with database.transaction() as session:
        connection = await session.connection()
        await connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO {name}")
