"""The sweeper: deliveries that are owed and have no job get one, and nothing else does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, text, update

from db import Database, DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason
from federation.base.queues.queue import delivery_queue
from federation.base.settings.settings import Settings
from federation.delivery.held.sweep_times import Sweeps
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox import sweeper as module
from federation.delivery.outbox.outbox import Outbox
from federation.delivery.outbox.sweeper import OutboxSweeper, Swept
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.entries import any_activity
from tests.federation.delivery.outbox.conftest import PAYLOAD, Place
from tests.federation.rows_read import costed
from tests.servers import free_port
from workers import StorageUnavailable
from workers.jobs import Completed, ErrorInfo, Failed, Retried
from workers.storage.base import ANY_NAME
from workers.storage.memory import MemoryStorage

AT_ONCE = timedelta(0)
NAME, PATH = "deliver-post", "/api/auth/social/posts"
as_its_database = pytest.mark.spread("queue_settings", always=("sqlite", "postgres"))
"""The rows decide; what the queue does for it is called by other tests here on every storage."""


def sweeper_of(place: Place, *, min_age: timedelta = AT_ONCE) -> OutboxSweeper:
    return OutboxSweeper(place.database, DeliveryQueues(place.queue), min_age=min_age)


async def owe(database: Database, number: int = 3) -> set[str]:
    """Rows as `Outbox` commits them, of a process that died before it added their jobs."""
    queues = DeliveryQueues(delivery_queue(Settings.from_values({}), MemoryStorage()))
    elsewhere = Outbox(database, queues, check=any_activity, joins=False)
    servers = [f"https://s{index}.example" for index in range(number - 1)]
    async with elsewhere.transaction() as session:
        shared = await elsewhere.enqueue_fanout(session, NAME, PATH, servers, PAYLOAD)
        own = await elsewhere.enqueue_delivery(session, NAME, "https://b.example" + PATH, "https://b.example", PAYLOAD)
    return {*shared, own}


async def test_a_delivery_without_a_job_gets_one(place: Place) -> None:
    """The very job that enqueueing adds, whether the text is the row's own or shared; a second sweep adds nothing."""
    owed = await owe(place.database)
    sweeper = sweeper_of(place)
    assert await sweeper.sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == owed
    assert await sweeper.sweep() == Swept(rows=0, added=0, complete=True)
    claims = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=10)
    async with place.outbox.transaction() as session:
        await place.outbox.enqueue_delivery(session, NAME, "https://b.example" + PATH, "https://b.example", PAYLOAD)
    (enqueued,) = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=10)
    assert {(claim.name, claim.max_attempts, claim.backoff) for claim in claims} == {
        (enqueued.name, enqueued.max_attempts, enqueued.backoff)
    }


async def test_a_delivery_of_before_the_clock_was_set_back_gets_its_job(place: Place) -> None:
    """It seems to be made days from now, and is not left alone until then."""
    owed = await owe(place.database)
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(created_at=datetime.now(UTC) + timedelta(days=3)))
    assert await sweeper_of(place, min_age=module.MIN_AGE).sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == owed


async def test_a_job_that_is_under_way_is_not_added_again(place: Place) -> None:
    """Whether it waits, runs, or failed and waits to run again."""
    async with place.outbox.transaction() as session:
        for _ in range(3):
            await place.enqueue(session)
    claims = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=2)
    error = ErrorInfo(type="E", message="m")
    await place.queue.storage.settle([Retried(claim=claims[0], error=error, delay=timedelta(hours=1))])
    before = await place.queue.storage.counts()
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(queued_at=None))
    assert await sweeper_of(place).sweep() == Swept(rows=3, added=0, complete=True)
    assert await place.queue.storage.counts() == before
    assert {row.series for row in (await place.rows()).values()} == {0}


async def test_a_delivery_that_is_ready_and_whose_job_has_ended_gets_another_one(place: Place) -> None:
    """Completed or failed, attempted or not: the job had no say, and queues take its id for a duplicate's."""
    async with place.outbox.transaction() as session:
        owed = {await place.enqueue(session) for _ in range(2)}
    claims = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=2)
    hour = timedelta(hours=1)
    await place.queue.storage.settle(
        [
            Completed(claim=claims[0], result=b"null", keep=hour),
            Failed(claim=claims[1], error=ErrorInfo(type="E", message="m"), keep=hour),
        ]
    )
    async with place.database.transaction() as session:
        attempted = {"queued_at": None, "attempts": 1, "last_attempted_at": datetime.now(UTC)}
        await session.execute(update(DeliveryJob).values(first_attempted_at=datetime.now(UTC), sending=1, **attempted))
    sweeper = sweeper_of(place)
    assert await sweeper.sweep() == Swept(rows=2, added=2, complete=True)
    assert await place.jobs() == {f"{each}.1" for each in owed}
    for row in (await place.rows()).values():
        assert (row.series, row.job_id, row.state) == (1, f"{row.id}.1", DeliveryState.READY)
        assert (row.attempts, row.first_attempted_at, row.sending) == (1, None, None)
    async with place.database.read() as session:
        log = (await session.execute(select(DeliveryAttempt))).scalars().all()
    assert {(each.delivery_id, each.series, each.attempt, each.error_code) for each in log} == {
        (each, 0, 1, "STALLED") for each in owed
    }
    assert await sweeper.sweep() == Swept(rows=0, added=0, complete=True)


@as_its_database
@pytest.mark.parametrize(
    "values",
    [
        {"job_name": None},
        {"settled_at": datetime.now(UTC)},
        {"state": DeliveryState.HELD, "held_reason": HoldReason.SERVER},
        {"state": DeliveryState.FAILED},
        {"state": DeliveryState.EXPIRED},
    ],
    ids=["of-a-node-producer", "settled", "held", "failed", "expired"],
)
async def test_rows_that_are_not_ours_to_send_are_left_alone(place: Place, values: dict[str, object]) -> None:
    """What a Node producer wrote, and what is settled, held or given up."""
    await owe(place.database)
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(**values))
    assert await sweeper_of(place).sweep() == Swept(rows=0, added=0, complete=True)
    assert await place.jobs() == set()


@as_its_database
async def test_a_job_may_take_a_while_to_come(place: Place) -> None:
    """The process that owes the delivery adds it after its transaction."""
    await owe(place.database)
    assert await sweeper_of(place, min_age=timedelta(minutes=5)).sweep() == Swept(rows=0, added=0, complete=True)
    assert await place.jobs() == set()


@as_its_database
async def test_an_attempted_delivery_without_a_job_gets_one(place: Place) -> None:
    """The row is ready, so it is owed: what its attempts came to does not matter. The id was never taken."""
    owed = await owe(place.database)
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(attempts=1, last_attempted_at=datetime.now(UTC)))
    assert await sweeper_of(place).sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == owed


async def test_a_series_whose_job_is_lost_in_the_middle_is_not_begun_again(place: Place) -> None:
    """Its attempts are on record by number: those to come are of another series. The one under way had no end."""
    owed = await owe(place.database)
    begun = {"attempts": 2, "last_attempted_at": datetime.now(UTC), "first_attempted_at": datetime.now(UTC)}
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(sending=2, **begun))
    sweeper = sweeper_of(place)
    assert await sweeper.sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == {f"{each}.1" for each in owed}
    async with place.database.read() as session:
        log = (await session.execute(select(DeliveryAttempt))).scalars().all()
    assert {(each.delivery_id, each.series, each.attempt, each.error_code) for each in log} == {
        (each, 0, 2, "STALLED") for each in owed
    }
    await place.queue.storage.remove([f"{each}.1" for each in owed])
    assert await sweeper_of(place).sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == {f"{each}.1" for each in owed}, "no attempt of it was made"


async def test_two_sweepers_at_once_add_one_job(place: Place) -> None:
    """Both find the ended job; the row names one new series, and its job is there once."""
    async with place.outbox.transaction() as session:
        owed = await place.enqueue(session)
    (claim,) = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=1)
    error = ErrorInfo(type="E", message="m")
    await place.queue.storage.settle([Failed(claim=claim, error=error, keep=timedelta(hours=1))])
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(queued_at=None))

    swept = await asyncio.gather(sweeper_of(place).sweep(), sweeper_of(place).sweep())

    assert sum(each.added for each in swept) >= 1
    assert await place.jobs() == {f"{owed}.1"}
    assert (await place.rows())[owed].job_id == f"{owed}.1"


@as_its_database
async def test_a_long_backlog_is_swept_in_turns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sweep looks at a bounded number of rows, the next goes on where it ended."""
    monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(module, "MAX_ROWS", 8)
    owed = await owe(place.database, 10)
    sweeper = sweeper_of(place)
    assert await sweeper.sweep() == Swept(rows=8, added=8, complete=False)
    assert await sweeper.sweep() == Swept(rows=2, added=2, complete=True)
    assert await place.jobs() == owed
    assert await sweeper.sweep() == Swept(rows=0, added=0, complete=True)


async def test_a_sweep_walks_along_the_backlog_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page goes on behind the one before: past all of them, the last page would read as much as all."""
    page, pages = 50, 20
    monkeypatch.setattr(module, "PAGE", page)
    queue = delivery_queue(Settings.from_values({}), MemoryStorage())
    await owe(database, page * pages)
    async with database.transaction() as session:
        if session.get_bind().dialect.name == "postgresql":  # which analyzes by itself; SQLite does not
            await session.execute(text("ANALYZE"))
    with costed() as rows:
        swept = await OutboxSweeper(database, DeliveryQueues(queue), min_age=AT_ONCE).sweep()
    assert swept == Swept(rows=page * pages, added=page * pages, complete=True)
    assert sum(rows) < 3 * page * pages


async def test_a_process_that_starts_believes_no_note_of_another_one(place: Place) -> None:
    """The queue may be another one by now, or the database a copy: each job is looked for at once, and once alone."""
    owed = await owe(place.database)
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(queued_at=datetime.now(UTC)))
    sweeper = sweeper_of(place)
    assert await sweeper.sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == owed
    assert await sweeper.sweep() == Swept(rows=0, added=0, complete=True)


async def test_a_job_that_the_queue_has_lost_is_added_again(place: Place) -> None:
    """Noticed when its row is looked at again: others are there, so nothing points to it."""
    owed = await owe(place.database)
    sweeper = sweeper_of(place)
    await sweeper.sweep()
    await place.queue.storage.remove(sorted(owed)[:1])
    assert (await sweeper.sweep()).added == 0
    async with place.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(queued_at=datetime.now(UTC) - 2 * module.ASK_AGAIN))
    assert await sweeper.sweep() == Swept(rows=3, added=1, complete=True)
    assert await place.jobs() == owed


async def test_a_queue_that_lost_its_data_is_filled_again_at_once(place: Place) -> None:
    """As Redis without persistence loses it in a restart: no job is there, and rows wait that had one."""
    owed = await owe(place.database)
    sweeper = sweeper_of(place)
    await sweeper.sweep()
    await place.queue.storage.remove(list(owed))
    assert await sweeper.sweep() == Swept(rows=3, added=3, complete=True)
    assert await place.jobs() == owed


async def test_jobs_at_work_are_no_sign_of_a_loss(place: Place) -> None:
    """Nobody waits in the queue, and the workers have what there is."""
    await owe(place.database)
    sweeper = sweeper_of(place)
    await sweeper.sweep()
    await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(minutes=1)}, limit=10)
    assert await sweeper.sweep() == Swept(rows=0, added=0, complete=True)
    assert await Sweeps(place.database).last() is None


async def test_a_loss_that_a_worker_noticed_is_looked_into_by_the_next_sweep(place: Place) -> None:
    """Wherever that runs, and although there are jobs in the queue again."""
    owed = await owe(place.database)
    sweeper = sweeper_of(place)
    await sweeper.sweep()
    await place.queue.storage.remove(sorted(owed)[:2])
    assert await Sweeps(place.database).note_lost_queue(datetime.now(UTC))
    assert not await Sweeps(place.database).note_lost_queue(datetime.now(UTC))
    assert await sweeper.sweep() == Swept(rows=3, added=2, complete=True)
    assert await place.jobs() == owed


async def test_a_queue_that_is_down_loses_nothing(
    make_settings: MakeSettings, redis_url: str, queue_prefix: str
) -> None:
    """Enqueued while Redis was away, swept in vain, and there once it is back."""
    away = Federation(make_settings(redis_url=f"redis://127.0.0.1:{free_port()}"))
    back = Federation(make_settings(redis_url=redis_url, federation_queue_prefix=queue_prefix))
    try:
        async with away.outbox.transaction() as session:
            delivery = await away.outbox.enqueue_delivery(
                session, NAME, "https://b.example" + PATH, "https://b.example", PAYLOAD
            )
        with pytest.raises(StorageUnavailable):
            await OutboxSweeper(away.database, away.delivery_queues, min_age=AT_ONCE).sweep()
        swept = await OutboxSweeper(back.database, back.delivery_queues, min_age=AT_ONCE).sweep()
        assert swept == Swept(rows=1, added=1, complete=True)
        assert (await back.delivery_queue.get_status(delivery)) is not None
    finally:
        await away.close()
        await back.close()
