"""Two databases on one queue: each node's jobs are its own to send, and everybody hears of the wrong setting."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select
from sqlmodel import col
from structlog.testing import capture_logs

from db import Database, DatabaseIdentity, DeliveryJob, DeliveryState, QueueSighting
from db.migrate import upgrade
from federation.base.queues.job_data import POST_JOB
from federation.base.queues.storages import queue_place
from federation.base.settings.settings import Settings
from federation.delivery.job_origins import pause_for
from federation.delivery.sightings import MOST_ORIGINS, Sightings, places, strangers
from federation.monitoring.prometheus import ProcessMetrics
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site, post_payload
from tests.peer import POSTS_PATH, Peer, acquaint
from workers import JobState
from workers.clock import ManualClock
from workers.jobs import Released
from workers.storage.base import ANY_NAME
from workers.worker.events import WorkerEventKind

shared_queues = pytest.mark.parametrize("queue_settings", ["file", "redis", "bullmq", "bull"], indirect=True)
"""Those that two databases can have in common."""
MINUTE = timedelta(minutes=1)
BULLMQ = "BullMQ at 127.0.0.1:6379, prefix bull"


@pytest.fixture
async def federation(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Federation]:
    node = Federation(make_settings(**queue_settings))
    yield node
    await node.close()


@pytest.fixture(params=["another database", "a copy of the database"])
async def other(
    request: pytest.FixtureRequest,
    make_settings: MakeSettings,
    queue_settings: dict[str, object],
    database_file: Path,
    tmp_path: Path,
) -> AsyncIterator[Federation]:
    """A node that has the queue of `federation` by mistake."""
    file = tmp_path / "other.db"
    url = f"sqlite:///{file}"
    name = "https://staging.example"
    if request.param == "another database":
        await asyncio.to_thread(upgrade, url)
        name = "https://a.example"
    else:
        shutil.copy(database_file, file)
    node = Federation(
        make_settings(**{**queue_settings, "database_url": url, "better_auth_url": name}), metrics=ProcessMetrics()
    )
    yield node
    await node.close()


@pytest.mark.spread("queue_settings")
@shared_queues
async def test_a_strangers_job_goes_back(federation: Federation, other: Federation, peer: Peer) -> None:
    """It is not taken for one that is over: its row stays ready, and its own node delivers it later."""
    await acquaint(federation, peer)
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
    with capture_logs() as logs:
        async with Site(other) as wrong:
            wrong.start()
            await wrong.until(lambda: any(event.kind is WorkerEventKind.SNOOZED for event in wrong.events))
    (line,) = [each for each in logs if each["event"] == "job_of_another_node"]
    assert (line["log_level"], line["delivery_id"], line["given_back_for"][:2]) == ("error", delivery, "60")
    job = await federation.delivery_queue.get_status(delivery)
    assert job is not None
    assert (job.state, job.attempt) == (JobState.SCHEDULED, 0)
    assert await row(federation, delivery) == (DeliveryState.READY, 0)
    assert peer.deliveries == []
    assert isinstance(other.metrics, ProcessMetrics)
    assert b"federation_jobs_of_other_nodes_total 1.0" in other.metrics.render()

    await other.sightings.tick()
    assert await strangers(other.database, datetime.now(UTC)) == [str(await federation.job_origin.get())]


@pytest.mark.spread("queue_settings")
@shared_queues
async def test_jobs_say_whose_they_are(federation: Federation, peer: Peer) -> None:
    """In the queue, where other implementations read it, beside what these need."""
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
    data = await job_data(federation, delivery)
    async with federation.database.read() as session:
        identity = (await session.execute(select(col(DatabaseIdentity.id)))).scalar_one()
    assert (data["node"], data["database"]) == ("https://a.example", identity)
    assert (data["payload"], data["payloadId"]) == ("", delivery)


@pytest.mark.parametrize("queue_settings", ["bullmq", "bull"], indirect=True)
async def test_jobs_may_carry_their_text(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """For Node's workers: that of a row of its own, and that which a fan-out shares; ours deliver both."""
    node = Federation(make_settings(**queue_settings, federation_job_payload="inline"))
    await acquaint(node, peer)
    async with Site(node) as site:
        own = await site.owe_post(peer)
        async with node.outbox.transaction() as session:
            (shared,) = await node.outbox.enqueue_fanout(
                session, POST_JOB, POSTS_PATH, [peer.url], post_payload("post-shared")
            )
        for delivery in (own, shared):
            data = await job_data(node, delivery)
            assert "payloadId" not in data
            assert str(data["payload"]).startswith("{")
        await site.ended(own, shared)
        assert [await row(node, delivery) for delivery in (own, shared)] == [None, None]
    assert len(peer.applied) == 2
    await node.close()


@pytest.mark.parametrize("queue_settings", ["bullmq"], indirect=True)
async def test_a_text_whose_row_is_gone_is_not_sent(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """A job of ours never stands for more than its row, also where it has the text."""
    node = Federation(make_settings(**queue_settings, federation_job_payload="inline"))
    await acquaint(node, peer)
    async with Site(node) as site:
        delivery = await site.owe_post(peer)
        async with node.database.transaction() as session:
            await session.execute(delete(DeliveryJob))
        await site.ended(delivery)
    assert peer.deliveries == []
    await node.close()


def test_the_pause_doubles() -> None:
    """As the job's age does; an hour at the most, whatever clocks say."""
    ages = [timedelta(days=-1), 0 * MINUTE, 1 * MINUTE, 3 * MINUTE, 31 * MINUTE, timedelta(days=3)]
    assert [pause_for(age) / MINUTE for age in ages] == [1, 1, 2, 4, 32, 60]


async def test_queues_in_two_places_are_told(database: Database) -> None:
    """By both processes, once a minute; a process that has not run for a while is forgotten."""
    clock = ManualClock()
    here, there = Sightings(database, "the database", clock=clock), Sightings(database, BULLMQ, clock=clock)
    with capture_logs() as logs:
        await here.tick()
        await there.tick()
        await here.tick()
        await here.tick()
    assert [(line["event"], line["here"], line["there"]) for line in logs] == [
        ("queues_in_two_places", BULLMQ, "the database"),
        ("queues_in_two_places", "the database", BULLMQ),
    ]
    assert set(await places(database, clock.now())) == {"the database", BULLMQ}
    clock.advance(timedelta(minutes=6))
    await here.tick()
    assert await places(database, clock.now()) == ["the database"]


async def test_strangers_take_no_room(database: Database) -> None:
    """Names come from jobs of others: a few are kept, for a day."""
    clock = ManualClock()
    sightings = Sightings(database, "the database", clock=clock)
    for number in range(3 * MOST_ORIGINS):
        sightings.stranger(f"https://{number}.example", "https://a.example", delivery_id="d", pause=MINUTE)
    await sightings.tick()
    assert len(await strangers(database, clock.now())) == MOST_ORIGINS + 1
    clock.advance(timedelta(days=2))
    await sightings.tick()
    async with database.read() as session:
        assert (await session.execute(select(func.count()).select_from(QueueSighting))).scalar_one() == 1


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, "the database"),
        ({"redis_url": "redis://user:secret@localhost:6379/2"}, "BullMQ at 127.0.0.1:6379/2, prefix bull"),
        ({"queue_url": "bullmq+redis://127.0.0.1"}, "BullMQ at 127.0.0.1, prefix bull"),
        ({"queue_url": "bull+rediss://:pw@queues:6380"}, "bull+rediss at queues:6380, prefix bull"),
        (
            {"queue_url": "redis+cluster://u:pw@B:2,localhost:1?wait_replicas=1"},
            "redis+cluster at 127.0.0.1:1,b:2, prefix bull",
        ),
        ({"redis_url": "rediss+sentinel://:pw@b,a:2/svc/1"}, "BullMQ at a:2,b/svc/1, prefix bull"),
        ({"queue_url": "file:///var/lib/queues"}, "file at /var/lib/queues"),
    ],
)
def test_a_place_has_no_secrets(values: dict[str, object], place: str) -> None:
    """And one spelling for one place."""
    assert queue_place(Settings.from_values(values)) == place


async def row(federation: Federation, delivery: str) -> tuple[DeliveryState, int] | None:
    async with federation.database.read() as session:
        found = await session.get(DeliveryJob, delivery)
        return None if found is None else (found.state, found.attempts)


async def job_data(federation: Federation, job_id: str) -> dict[str, object]:
    """As it lies in the queue."""
    queue = federation.delivery_queue
    await queue.start()
    claims = await queue.storage.claim("reader", leases={ANY_NAME: MINUTE}, limit=10)
    await queue.storage.settle([Released(claim=claim) for claim in claims])
    (payload,) = [claim.payload for claim in claims if claim.job_id == job_id]
    return dict(json.loads(payload))
