"""A wire with a queue of its own: its jobs lie there and nowhere else, and either queue may be lost by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select, text
from structlog.testing import capture_logs

from db import DeliveryJob, new_id
from federation.admin.deliveries.bulk import BulkDeliveries
from federation.admin.deliveries.deliveries import OPEN, Selection
from federation.admin.queues import all_queues, chosen_queues
from federation.base.queues.job_data import ACTIVITY_JOB, POST_JOB
from federation.base.queues.queue import ACTIVITIES_QUEUE_NAME, DELIVERY_QUEUE_NAME
from federation.base.settings.settings import Settings
from federation.delivery.outbox.sweeper import OutboxSweeper
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.misbehaving import MisbehavingServer, respond
from tests.patience import until
from tests.plain_wire import PLAIN_JOB, PLAIN_PATH, PlainWire
from workers import JobState
from workers.jobs import EnqueueStatus, Released
from workers.storage.base import ANY_NAME
from workers.worker.events import WorkerEvent, WorkerEventKind

pytestmark = pytest.mark.spread("queue_settings", always=("sqlite", "bullmq"))

PLAIN_QUEUE = "federation-plain"
SERVER = "https://b.example"
AT_ONCE = timedelta(0)
MINUTE = timedelta(minutes=1)


def node_of(settings: Settings) -> Federation:
    """A node that sends jobs of one name by a wire that has a queue of its own."""
    return Federation(settings, wires=lambda node: [PlainWire(node.fetch)], own_queues={PLAIN_JOB: PLAIN_QUEUE})


@pytest.fixture
async def node(make_settings: MakeSettings, queue_settings: dict[str, object]) -> AsyncIterator[Federation]:
    node = node_of(make_settings(**queue_settings))
    yield node
    await node.close()


async def owe(node: Federation, *names: str, to: str = SERVER) -> list[str]:
    """A delivery by a job of each name, all of one transaction."""
    async with node.outbox.transaction() as session:
        return [
            await node.outbox.enqueue_delivery(
                session,
                name,
                to + PLAIN_PATH,
                to,
                post_payload(new_id()) if name == POST_JOB else f'{{"id":"{new_id()}"}}',
            )
            for name in names
        ]


async def jobs(node: Federation) -> dict[str, set[str]]:
    """The ids of the jobs that wait in each queue of deliveries."""
    await node.delivery_queues.start()
    return {
        queue.storage.queue: {job.id for job in (await queue.storage.list(JobState.QUEUED)).jobs}
        for queue in node.delivery_queues.all
    }


async def lose(node: Federation, name: str) -> None:
    """Of one queue everything is gone."""
    (queue,) = chosen_queues(node, name)
    await queue.storage.remove([job.id for job in (await queue.storage.list(JobState.QUEUED)).jobs])


def sweeper_of(node: Federation) -> OutboxSweeper:
    return OutboxSweeper(node.database, node.delivery_queues, min_age=AT_ONCE)


async def test_a_node_for_another_loop_has_the_same_wires_and_queues(node: Federation) -> None:
    """What plain code of a process owes by them goes where the node of its event loop looks."""
    other = node.another()
    try:
        [delivery_id] = await owe(other, PLAIN_JOB)
    finally:
        await other.close()
    assert (await jobs(node))[PLAIN_QUEUE] == {delivery_id}


async def test_each_job_lies_in_the_queue_of_its_wire(node: Federation) -> None:
    """Also where several are owed together, and where a sweep adds them."""
    post, plain, another = await owe(node, POST_JOB, PLAIN_JOB, POST_JOB)
    expected = {DELIVERY_QUEUE_NAME: {post, another}, PLAIN_QUEUE: {plain}}
    assert await jobs(node) == expected
    await lose(node, DELIVERY_QUEUE_NAME)
    await lose(node, PLAIN_QUEUE)
    assert (await sweeper_of(node).sweep()).added == 3
    assert await jobs(node) == expected


async def test_what_became_of_jobs_is_told_in_their_order(node: Federation) -> None:
    """However they are spread over the queues."""
    names = [PLAIN_JOB, POST_JOB, POST_JOB, PLAIN_JOB]
    await node.delivery_queues.add_bulk([(PLAIN_JOB, {}, {"jobId": "job-3"})])
    added = await node.delivery_queues.add_bulk([(name, {}, {"jobId": f"job-{i}"}) for i, name in enumerate(names)])
    assert [each.id for each in added] == ["job-0", "job-1", "job-2", "job-3"]
    assert [each.status is EnqueueStatus.QUEUED for each in added] == [True, True, True, False]


@pytest.mark.parametrize("lost", [DELIVERY_QUEUE_NAME, PLAIN_QUEUE])
async def test_a_queue_that_is_lost_by_itself_is_noticed(node: Federation, lost: str) -> None:
    """Though the other one has all its jobs: at the next sweep, which adds what is missing."""
    await owe(node, POST_JOB, PLAIN_JOB)
    sweeper = sweeper_of(node)
    await sweeper.sweep()
    before = await jobs(node)
    assert not await sweeper.lacks_jobs()
    await lose(node, lost)
    assert await sweeper.lacks_jobs()
    with capture_logs() as logs:
        assert (await sweeper.sweep()).added == 1
    assert [log["event"] for log in logs] == ["queue_lost_its_data", "outbox_jobs_added"]
    assert await jobs(node) == before


async def test_a_queue_without_deliveries_of_its_own_is_not_missed(node: Federation) -> None:
    """It is empty, and nothing of it is owed."""
    await owe(node, POST_JOB)
    sweeper = sweeper_of(node)
    await sweeper.sweep()
    assert not await sweeper.lacks_jobs()


async def test_operators_act_on_either_queue(node: Federation) -> None:
    """What is dropped has its job removed, unless a worker is at it."""
    post, plain, busy = await owe(node, POST_JOB, PLAIN_JOB, PLAIN_JOB)
    (queue,) = chosen_queues(node, "plain")
    await queue.start()
    claims = await queue.storage.claim("w", leases={ANY_NAME: MINUTE}, limit=2)
    held = next(claim for claim in claims if claim.job_id == busy)
    await queue.storage.settle([Released(claim=claim) for claim in claims if claim is not held])
    bulk = BulkDeliveries(node.database, node.delivery_queues)
    dropped = await bulk.drop(Selection(state=OPEN))
    assert (dropped.dropped, dropped.busy) == (2, 1)
    assert post not in (await jobs(node))[DELIVERY_QUEUE_NAME]
    assert plain not in (await jobs(node))[PLAIN_QUEUE]


@pytest.mark.parametrize("queue_settings", ["bullmq"], indirect=True)
async def test_only_the_first_queue_has_texts_in_it(
    make_settings: MakeSettings, queue_settings: dict[str, object]
) -> None:
    """With jobs that carry their text, for Node's workers: those are on the delivery queue alone."""
    node = node_of(make_settings(**queue_settings, federation_job_payload="inline"))
    try:
        await owe(node, POST_JOB, PLAIN_JOB)
        await node.delivery_queues.start()
        data = {
            queue.storage.queue: claim.payload
            for queue in node.delivery_queues.all
            for claim in await queue.storage.claim("w", leases={ANY_NAME: MINUTE}, limit=9)
        }
    finally:
        await node.close()
    assert b"FEDERATE_POST" in data[DELIVERY_QUEUE_NAME]
    assert b'"payload":""' in data[PLAIN_QUEUE]
    assert b"payloadId" in data[PLAIN_QUEUE]


@pytest.mark.parametrize("queue_settings", ["sqlite", "bullmq", "file"], indirect=True)
async def test_a_wire_that_is_off_leaves_no_trace(
    make_settings: MakeSettings, queue_settings: dict[str, object], redis_url: str
) -> None:
    """No key, row or directory of its queue, whatever is owed, swept and looked at."""
    settings = make_settings(**queue_settings)
    node = Federation(settings)
    await owe(node, POST_JOB)
    await node.outbox_sweeper.sweep()
    assert ACTIVITIES_QUEUE_NAME not in {queue.storage.queue for queue in all_queues(node)}
    if node.queues_join_database:
        names = {row[0] for row in await node.database.rows(text("SELECT name FROM workers_queues"))}
        assert names == {DELIVERY_QUEUE_NAME}
    await node.close()
    if settings.redis_url:
        async with Redis.from_url(redis_url) as redis:
            assert await redis.keys(f"{settings.federation_queue_prefix}:{DELIVERY_QUEUE_NAME}:*")
            assert not await redis.keys(f"{settings.federation_queue_prefix}:{ACTIVITIES_QUEUE_NAME}:*")


async def test_what_is_owed_by_a_wire_that_was_switched_off_waits_in_its_queue(
    make_settings: MakeSettings, queue_settings: dict[str, object]
) -> None:
    """Not in the delivery queue, whose workers do not know it; nor does that look as if it had lost its data."""
    node = Federation(make_settings(**queue_settings))
    try:
        (delivery,) = await owe(node, POST_JOB)
        async with node.database.transaction() as session:
            await session.execute(
                text("UPDATE delivery_jobs SET job_name = :name, wire = 'activitypub'"), {"name": ACTIVITY_JOB}
            )
        await node.delivery_queues.start()
        await node.delivery_queue.storage.remove([delivery])
        sweeper = sweeper_of(node)
        assert (await sweeper.sweep()).added == 1
        assert await jobs(node) == {DELIVERY_QUEUE_NAME: set()}
        waits = await node.delivery_queues.of(ACTIVITY_JOB).get_status(delivery)
        assert waits is not None
        assert not await sweeper.lacks_jobs()
    finally:
        await node.close()


async def test_a_wire_that_is_on_has_a_worker_on_its_queue(
    make_settings: MakeSettings, queue_settings: dict[str, object]
) -> None:
    """It starts and stops with the others, and delivers; operators and gauges see the queue."""
    settings = make_settings(**queue_settings, federation_activitypub=True)
    ready: set[str] = set()

    def note(event: WorkerEvent) -> None:
        if event.kind is WorkerEventKind.READY:
            ready.add(event.queue)

    node = node_of(settings)
    workers = FederationWorkers(node, observers=[note])
    try:
        async with MisbehavingServer() as server:
            server.default = respond(202)
            await owe(node, PLAIN_JOB, PLAIN_JOB, to=server.url)
            workers.start()
            await until(lambda: none_left(node))
            await until(lambda: ready >= {DELIVERY_QUEUE_NAME, PLAIN_QUEUE, ACTIVITIES_QUEUE_NAME})
            assert [request.path for request in server.requests] == [PLAIN_PATH] * 2
        names = [queue.storage.queue for queue in all_queues(node)]
        assert names[:3] == [DELIVERY_QUEUE_NAME, ACTIVITIES_QUEUE_NAME, PLAIN_QUEUE]
        assert (await node.readiness()).ready
    finally:
        await workers.stop()
        await node.close()


@pytest.mark.parametrize("queue_settings", ["sqlite"], indirect=True)
async def test_its_worker_stops_with_the_delivery_worker(node: Federation) -> None:
    """An application may stop that one alone, and start it anew: no second worker is left behind."""
    workers = FederationWorkers(node)
    with capture_logs() as logs:
        delivery, health_check = workers.start()
        await until(lambda: PLAIN_QUEUE in queues_of(logs, "worker_ready"))
        await delivery.stop()
        await until(lambda: PLAIN_QUEUE in queues_of(logs, "worker_stopped"))
        assert not health_check.task.done()
        await workers.stop()


def queues_of(logs: Sequence[Mapping[str, object]], event: str) -> list[object]:
    """The queues of which the workers have told that."""
    return [log["queue"] for log in logs if log["event"] == event]


async def none_left(node: Federation) -> bool:
    return (await node.database.rows(select(func.count()).select_from(DeliveryJob)))[0][0] == 0
