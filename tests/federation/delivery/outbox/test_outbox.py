"""The outbox: a row and its job, both or neither, wherever the queue lives."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from structlog.testing import capture_logs

from db import Database
from db.url import parse_url
from federation.base.queues.queue import delivery_queue
from federation.base.settings.settings import Settings
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox.outbox import Outbox
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.entries import any_activity
from tests.federation.delivery.outbox.conftest import PAYLOAD, SERVER, TARGET, Place
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port
from workers import StorageUnavailable
from workers.jobs import EnqueueStatus
from workers.storage.base import ANY_NAME
from workers.storage.memory import MemoryStorage

pytestmark = pytest.mark.spread("queue_settings", always=("sqlite", "postgres"))


class Interrupted(Exception):
    """What a test raises in a transaction."""


@pytest.fixture
def joined(federation: Federation) -> Place:
    """The embedded default: queue and rows in one SQLite file."""
    return Place(outbox=federation.outbox, database=federation.database, queue=federation.delivery_queue)


@pytest.fixture
async def apart(database: Database) -> AsyncIterator[Place]:
    """The queue elsewhere, in memory; rows on SQLite and on PostgreSQL."""
    queue = delivery_queue(Settings.from_values({}), MemoryStorage())
    outbox = Outbox(database, DeliveryQueues(queue), check=any_activity, joins=False)
    yield Place(outbox=outbox, database=database, queue=queue)
    await outbox.close()


@pytest.fixture
async def engine(apart: Place, database_url: str) -> AsyncIterator[AsyncEngine]:
    """The application's own engine on the same database as `apart`."""
    url = parse_url(database_url)
    own = create_async_engine(url.set(drivername="sqlite+aiosqlite") if url.get_backend_name() == "sqlite" else url)
    yield own
    await own.dispose()


async def test_a_transaction_commits_row_and_job_together(place: Place) -> None:
    """The row says what is owed, the job refers to its text."""
    async with place.outbox.transaction() as session:
        delivery_id = await place.enqueue(session)
        assert await place.rows() == {}
        assert await place.jobs() == set()
    (row,) = (await place.rows()).values()
    assert (row.id, row.job_name, row.server_url, row.target_url) == (delivery_id, "deliver-post", SERVER, TARGET)
    assert (row.payload, row.attempts, row.last_attempted_at, row.settled_at) == (PAYLOAD, 0, None, None)
    assert await place.jobs() == {delivery_id}
    (claim,) = await place.queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=5)}, limit=5)
    assert (claim.name, claim.max_attempts) == ("deliver-post", 5)
    data = json.loads(claim.payload)
    assert {name: value for name, value in data.items() if name not in ("node", "database")} == {
        "deliveryJobId": delivery_id,
        "targetUrl": TARGET,
        "serverUrl": SERVER,
        "payload": "",
        "payloadId": delivery_id,
    }


async def test_a_transaction_that_raises_leaves_neither_row_nor_job(place: Place) -> None:
    """Nothing of it is ever seen."""
    with suppress(Interrupted):
        async with place.outbox.transaction() as session:
            await place.enqueue(session)
            await session.flush()
            raise Interrupted
    assert await place.rows() == {}
    assert await place.jobs() == set()


async def test_many_deliveries_of_one_transaction_are_all_there_afterwards(place: Place) -> None:
    """As a post to many servers makes them."""
    async with place.outbox.transaction() as session:
        ids = {await place.enqueue(session) for _ in range(50)}
    assert await place.jobs() == (await place.rows()).keys() == ids


async def test_ids_of_deliveries_grow_with_time(place: Place) -> None:
    """So that indexes of many millions grow at one end: of one delivery, and of those of a fan-out."""
    async with place.outbox.transaction() as session:
        one = await place.enqueue(session)
        others = await place.outbox.enqueue_fanout(session, "deliver-post", "/inbox", [SERVER], PAYLOAD)
    assert {uuid.UUID(each).version for each in (one, *others)} == {7}


async def test_a_savepoint_rolled_back_takes_its_deliveries_with_it(place: Place) -> None:
    """What was enqueued before and after it stays."""
    async with place.outbox.transaction() as session:
        before = await place.enqueue(session)
        with suppress(Interrupted):
            async with session.begin_nested():
                await place.enqueue(session)
                raise Interrupted
        async with session.begin_nested():
            kept = await place.enqueue(session)
        assert await place.jobs() == set()
    assert await place.jobs() == (await place.rows()).keys() == {before, kept}


async def test_adding_the_job_of_a_row_again_is_harmless(place: Place) -> None:
    """As a sweeper would that saw the row before its job."""
    async with place.outbox.transaction() as session:
        delivery_id = await place.enqueue(session)
    again = await place.queue.add("deliver-post", {}, {"jobId": delivery_id})
    assert again.status is EnqueueStatus.DUPLICATE
    assert await place.jobs() == {delivery_id}


async def test_the_first_use_of_the_queue_may_be_in_a_transaction_that_has_written(place: Place) -> None:
    """Nothing waits for a lock that the transaction itself holds."""
    async with asyncio.timeout(PATIENCE_SECONDS), place.outbox.transaction() as session:
        delivery_id = await place.enqueue(session)
        await session.flush()
    assert await place.jobs() == {delivery_id}


async def test_in_the_same_database_the_job_is_in_the_callers_own_transaction(joined: Place) -> None:
    """With a session of the caller's own too: committed together, and together rolled back."""
    async with joined.database.transaction() as session:
        first = await joined.enqueue(session)
        second = await joined.enqueue(session)
        assert await joined.jobs() == set()
    assert await joined.jobs() == (await joined.rows()).keys() == {first, second}
    with suppress(Interrupted):
        async with joined.database.transaction() as session:
            await joined.enqueue(session)
            raise Interrupted
    assert await joined.jobs() == (await joined.rows()).keys() == {first, second}


async def test_elsewhere_the_job_follows_the_commit_of_the_callers_own_session(
    apart: Place, engine: AsyncEngine
) -> None:
    """Each commit of a session that is used again and again, and no rollback, brings its jobs into the queue."""
    async with AsyncSession(engine) as session:
        first = await apart.enqueue(session)
        await session.flush()
        assert await apart.jobs() == set()
        await session.commit()
        await apart.outbox.close()
        assert await apart.jobs() == {first}
        await apart.enqueue(session)
        await session.flush()
        await session.rollback()
        second = await apart.enqueue(session)
        third = await apart.enqueue(session)
        await session.commit()
    await apart.outbox.close()
    assert await apart.jobs() == (await apart.rows()).keys() == {first, second, third}


async def test_elsewhere_a_savepoint_of_the_callers_own_session_is_no_commit(apart: Place, engine: AsyncEngine) -> None:
    """Its end adds no job, and its rollback forgets only its own."""
    async with AsyncSession(engine) as session, session.begin():
        first = await apart.enqueue(session)
        async with session.begin_nested():
            second = await apart.enqueue(session)
        await apart.outbox.close()
        assert await apart.jobs() == set()
        with suppress(Interrupted):
            async with session.begin_nested():
                await apart.enqueue(session)
                raise Interrupted
    await apart.outbox.close()
    assert await apart.jobs() == (await apart.rows()).keys() == {first, second}


async def test_elsewhere_a_session_closed_without_commit_brings_no_job_later(apart: Place, engine: AsyncEngine) -> None:
    """What it forgot is not added by the next commit."""
    session = AsyncSession(engine)
    await apart.enqueue(session)
    await session.close()
    kept = await apart.enqueue(session)
    await session.commit()
    await session.close()
    await apart.outbox.close()
    assert await apart.jobs() == (await apart.rows()).keys() == {kept}


async def test_a_queue_that_is_down_after_the_commit_is_logged_and_the_delivery_owed(
    make_settings: MakeSettings,
) -> None:
    """The caller's transaction stands; the log names the delivery."""
    federation = Federation(make_settings(redis_url=f"redis://127.0.0.1:{free_port()}"))
    place = Place(outbox=federation.outbox, database=federation.database, queue=federation.delivery_queue)
    try:
        with capture_logs() as logs:
            async with place.outbox.transaction() as session:
                delivery_id = await place.enqueue(session)
        assert (await place.rows())[delivery_id].job_name == "deliver-post"
        (line,) = [entry for entry in logs if entry["event"] == "outbox_jobs_not_added"]
        assert line["delivery_ids"] == [delivery_id]
        assert line["error"] == StorageUnavailable.__name__
        assert PAYLOAD not in str(logs)
    finally:
        await federation.close()


@pytest.mark.parametrize(
    ("name", "target", "server", "payload"),
    [
        ("", TARGET, SERVER, PAYLOAD),
        ("n" * 513, TARGET, SERVER, PAYLOAD),
        ("deliver-post", TARGET, SERVER, "s3cret"),
        ("deliver-post", TARGET, SERVER, '"s3cret"'),
        ("deliver-post", TARGET, SERVER, '{"method":"s3cret"}'),
        ("deliver-post", TARGET, SERVER, '{"method":"FEDERATE_POST","x":"' + "s3cret" * 400_000 + '"}'),
        ("deliver-post", TARGET, SERVER, '{"method":"FEDERATE_POST","x":"s3cret\ud800"}'),
        ("deliver-post", "https://c.example/inbox", SERVER, PAYLOAD),
        ("deliver-post", "http://b.example/inbox", SERVER, PAYLOAD),
        ("deliver-post", "https://b.example:444/inbox", SERVER, PAYLOAD),
        ("deliver-post", "https://b.example@c.example/inbox", SERVER, PAYLOAD),
        ("deliver-post", "/inbox", SERVER, PAYLOAD),
        ("deliver-post", TARGET + "/\u00e9", SERVER, PAYLOAD),
        ("deliver-post", TARGET + "/" + "x" * 2048, SERVER, PAYLOAD),
        ("deliver-post", TARGET, "b.example", PAYLOAD),
        ("deliver-post", TARGET, "ftp://b.example", PAYLOAD),
    ],
)
async def test_what_cannot_be_delivered_is_refused_before_anything_is_written(
    place: Place, name: str, target: str, server: str, payload: str
) -> None:
    """The call raises; the transaction goes on and holds nothing of it. The error quotes no payload."""
    async with place.outbox.transaction() as session:
        with pytest.raises(ValueError, match=r".") as error:
            await place.outbox.enqueue_delivery(session, name, target, server, payload)
        assert not session.new
    assert "s3cret" not in str(error.value)
    assert await place.rows() == {}
    assert await place.jobs() == set()


async def test_the_server_of_a_delivery_is_named_in_its_canonical_form(place: Place) -> None:
    """Other spellings of one server make no second server of it."""
    async with place.outbox.transaction() as session:
        await place.outbox.enqueue_delivery(
            session, "deliver-post", "https://b.example/inbox", "HTTPS://B.example:443/", PAYLOAD
        )
    assert [row.server_url for row in (await place.rows()).values()] == [SERVER]


async def test_transactions_side_by_side_keep_their_deliveries_apart(apart: Place) -> None:
    """One that fails takes nothing from the others."""

    async def write(number: int) -> str | None:
        try:
            async with apart.outbox.transaction() as session:
                delivery_id = await apart.enqueue(session)
                await asyncio.sleep(0)
                if number % 3 == 0:
                    raise Interrupted
                return delivery_id
        except Interrupted:
            return None

    ids = {delivery_id for delivery_id in await asyncio.gather(*map(write, range(12))) if delivery_id}
    assert len(ids) == 8
    assert await apart.jobs() == (await apart.rows()).keys() == ids
