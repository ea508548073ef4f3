"""While the database does not answer, deliveries wait in the queue and lose nothing by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import func, select, text
from structlog.testing import capture_logs

from db import DeliveryJob
from db.migrate import upgrade
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.patience import until
from tests.peer import Peer, acquaint
from tests.servers import postgres_process
from workers import JobState

DELIVERIES = 30


async def test_nothing_is_claimed_while_the_database_is_away(
    make_settings: MakeSettings, peer: Peer, tmp_path: Path
) -> None:
    """The first attempts hear of it and go back, uncounted; nobody else is claimed, and all arrive afterwards."""
    with postgres_process() as server:
        await asyncio.to_thread(upgrade, server.url)
        settings = make_settings(
            database_url=server.url, queue_url=f"file://{tmp_path}/queues", federation_delivery_concurrency=3
        )
        federation = Federation(settings)
        await acquaint(federation, peer)
        async with Site(federation) as site:
            deliveries = await site.owe_posts(peer, DELIVERIES)
            await asyncio.to_thread(server.stop)
            site.start()
            await until(lambda: site.failing)
            assert peer.deliveries == []

            await asyncio.to_thread(server.start)
            await site.ended(*deliveries)

            sent_back = {event.claim.job_id for event in site.failing if event.claim is not None}
            assert len(sent_back) <= settings.federation_delivery_concurrency
            fates = [await site.fate(delivery) for delivery in deliveries]
            assert [fate.row for fate in fates] == [None] * DELIVERIES
            assert {(fate.state, tuple(fate.codes)) for fate in fates} == {(JobState.COMPLETED, (None,))}
            assert {entry.attempt for fate in fates for entry in fate.log} == {1}
        await federation.close()
    assert (len(peer.applied), peer.replayed) == (DELIVERIES, 0)


async def test_a_release_goes_on_when_the_database_is_back(
    make_settings: MakeSettings, peer: Peer, tmp_path: Path
) -> None:
    """It dies with a part of what was held released: all arrives, and what was under way at most twice."""
    with postgres_process() as server:
        await asyncio.to_thread(upgrade, server.url)
        settings = make_settings(
            database_url=server.url, queue_url=f"file://{tmp_path}/queues", federation_release_rate=4
        )
        federation = Federation(settings)
        await acquaint(federation, peer)
        await federation.links.hold(peer.url)
        await Site(federation).owe_posts(peer, DELIVERIES)
        workers = FederationWorkers(federation)
        workers.start()
        await federation.links.release(peer.url)
        with capture_logs() as logs:
            await until(lambda: len(peer.applied) >= 3)
            await asyncio.to_thread(server.crash)
            await until(lambda: any(event["event"] == "tending_failed" for event in logs))
            arrived = len(peer.applied)
            await asyncio.to_thread(server.start)

        async def is_over() -> bool:
            return await owed(federation) == 0

        await until(is_over)
        await workers.stop()
        await federation.close()
    assert 3 <= arrived < DELIVERIES == len(peer.applied)
    assert peer.replayed <= settings.federation_per_server


async def owed(federation: Federation) -> int:
    async with federation.database.read() as session:
        return (await session.execute(select(func.count()).select_from(DeliveryJob))).scalar_one()


async def test_a_table_that_is_gone_is_no_outage(federation: Federation, peer: Peer) -> None:
    """The log says that the database refuses; deliveries wait, and arrive when the table is there again."""
    await acquaint(federation, peer)
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
        await rename(federation, "server_links", "links_gone")
        with capture_logs() as logs:
            site.start()
            await until(lambda: site.failing)
        assert [entry["event"] for entry in logs if entry["event"].startswith("database_")] == ["database_refuses"]
        assert peer.deliveries == []
        await rename(federation, "links_gone", "server_links")
        await site.ended(delivery)
        assert (await site.fate(delivery)).row is None


async def rename(federation: Federation, table: str, name: str) -> None:
    async with federation.database.transaction() as session:
        await session.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))
