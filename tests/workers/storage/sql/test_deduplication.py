"""Deduplication keys in SQL, beyond the suite: callers' transactions, races of producers, and what stays behind."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.workers.storage.sql.steps import MINUTE, claim_all, on_postgres, rows_read
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import StorageUnavailable
from workers.jobs import Completed, EnqueueResult, EnqueueStatus, JobState, NewJob
from workers.storage.sql import SqlStorage
from workers.testing.steps import PATIENCE, job, until

SIMPLE = Deduplication(key="key")
THROTTLE = Deduplication(key="key", mode=DeduplicationMode.THROTTLE, ttl=MINUTE)
DEBOUNCE = Deduplication(key="key", mode=DeduplicationMode.DEBOUNCE, ttl=MINUTE)
MODES = (SIMPLE, THROTTLE, DEBOUNCE)

each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode.value)


def keyed(job_id: str, key: Deduplication, payload: bytes = b"1") -> NewJob:
    """A job that wants the key."""
    return job(job_id, payload=payload, deduplication=key)


def taken_by(job_id: str, state: JobState | None = JobState.QUEUED) -> EnqueueResult:
    return EnqueueResult(id=job_id, status=EnqueueStatus.DUPLICATE, existing_state=state)


def marks(url: str) -> list[tuple[str, str]]:
    """The key and the job of every mark in the table."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = [(row.key, row.job_id) for row in connection.execute(text("SELECT key, job_id FROM workers_marks"))]
    engine.dispose()
    return found


async def until_it_waits(admin: psycopg.Connection, how_many: int = 1) -> None:
    """So many on the database wait for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await until(lambda: admin.execute(waiting).fetchone() == (how_many,))


# The caller's transaction


@each_mode
async def test_a_rolled_back_transaction_leaves_the_key_free(
    url: str, storage: SqlStorage, engine: AsyncEngine, mode: Deduplication
) -> None:
    """Within the transaction the key is taken; with its end there is neither job nor mark, and another takes it."""
    waits = JobState.SCHEDULED if mode is DEBOUNCE else JobState.QUEUED
    async with AsyncSession(engine) as session:
        await storage.enqueue([keyed("never", mode)], connection=session)
        assert await storage.enqueue([keyed("other", mode)], connection=session) == [taken_by("never", waits)]
        await session.rollback()
    assert sum((await storage.counts()).values()) == 0
    assert marks(url) == []
    [answer] = await storage.enqueue([keyed("first", mode)])
    assert answer.status is EnqueueStatus.QUEUED


@each_mode
async def test_a_committed_transaction_has_taken_the_key(
    storage: SqlStorage, engine: AsyncEngine, mode: Deduplication
) -> None:
    """Everybody is told its job from then on."""
    waits = JobState.SCHEDULED if mode is DEBOUNCE else JobState.QUEUED
    async with AsyncSession(engine) as session:
        await storage.enqueue([keyed("first", mode)], connection=session)
        await session.commit()
    assert await storage.enqueue([keyed("other", mode)]) == [taken_by("first", waits)]


async def test_a_rolled_back_debounce_changes_nothing(storage: SqlStorage, engine: AsyncEngine) -> None:
    """The job has the payload and the due time that it had."""
    await storage.enqueue([keyed("first", DEBOUNCE)])
    [before] = await storage.status(["first"])
    async with AsyncSession(engine) as session:
        later = Deduplication(key="key", mode=DeduplicationMode.DEBOUNCE, ttl=2 * MINUTE)
        assert await storage.enqueue([keyed("other", later, b"2")], connection=session) == [
            taken_by("first", JobState.SCHEDULED)
        ]
        await session.rollback()
    assert await storage.status(["first"]) == [before]
    await storage.promote(["first"])
    assert [claim.payload for claim in await claim_all(storage)] == [b"1"]


async def test_a_rolled_back_ending_leaves_the_key_taken(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Who ended the job in the transaction may take its key there; after the rollback it is that job's again."""
    await storage.enqueue([keyed("first", SIMPLE)])
    [claim] = await claim_all(storage)
    async with AsyncSession(engine) as session:
        await storage.settle([Completed(claim=claim, result=b"")], connection=session)
        [answer] = await storage.enqueue([keyed("second", SIMPLE)], connection=session)
        assert answer.status is EnqueueStatus.QUEUED
        await session.rollback()
    assert await storage.enqueue([keyed("third", SIMPLE)]) == [taken_by("first", JobState.PROCESSING)]


# Producers side by side


@on_postgres
@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
@each_mode
async def test_a_producer_waits_for_the_key_in_an_open_transaction(
    storage: SqlStorage, engine: AsyncEngine, admin: psycopg.Connection, mode: Deduplication, commits: bool
) -> None:
    """Whether that commits decides who has the key, also when another transaction waits for it in its turn."""
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await storage.enqueue([keyed("first", mode)], connection=session)
        waiting = asyncio.create_task(storage.enqueue([keyed("second", mode)]))
        await until_it_waits(admin)
        assert await claim_all(storage) == []
        await (session.commit() if commits else session.rollback())
        [answer] = await waiting
    assert (answer.id, answer.status is EnqueueStatus.QUEUED) == (("first", False) if commits else ("second", True))


@on_postgres
async def test_who_finds_a_key_taken_waits_for_nobody(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Not for a transaction that is about to end the job, nor for one that was told the same."""
    await storage.enqueue(
        [keyed("first", SIMPLE), keyed("throttled", Deduplication(key="t", mode=THROTTLE.mode, ttl=MINUTE))]
    )
    claims = await claim_all(storage)
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await storage.enqueue([keyed("other", SIMPLE)], connection=session)
        await storage.settle([Completed(claim=claim, result=b"") for claim in claims], connection=session)
        throttle = Deduplication(key="t", mode=THROTTLE.mode, ttl=MINUTE)
        assert await storage.enqueue([keyed("another", SIMPLE), keyed("one more", throttle)]) == [
            taken_by("first", JobState.PROCESSING),
            taken_by("throttled", JobState.PROCESSING),
        ]
        await session.commit()
    [answer] = await storage.enqueue([keyed("second", SIMPLE)])
    assert answer.status is EnqueueStatus.QUEUED


async def test_a_hundred_producers_by_any_mode_insert_one_job(url: str, storage: SqlStorage) -> None:
    """Of concurrent enqueues with one key by different modes one inserts its job."""
    for number in range(5):
        modes = [Deduplication(key=f"{number}", mode=mode.mode, ttl=mode.ttl) for mode in MODES]
        answers = await asyncio.gather(
            *(storage.enqueue([keyed(f"{number} {at}", modes[at % 3])]) for at in range(100))
        )
        winners = [answer.id for [answer] in answers if answer.status is EnqueueStatus.QUEUED]
        assert len(winners) == 1
        assert {answer.id for [answer] in answers} == set(winners)
    assert sum((await storage.counts()).values()) == 5


@on_postgres
async def test_calls_with_several_keys_do_not_lock_each_other_out(
    storage: SqlStorage, engine: AsyncEngine, admin: psycopg.Connection
) -> None:
    """Two calls that wait for a key in the midst of theirs, in different orders, go on when it is free."""
    source = random.Random(7)
    for turn in range(5):
        keys = [Deduplication(key=f"{turn} {number:02}") for number in range(20)]
        calls = [[keyed(f"{caller} {key.key}", key) for key in source.sample(keys, 20)] for caller in "ab"]
        async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
            await storage.enqueue([keyed("never", keys[10])], connection=session)
            waiting = [asyncio.create_task(storage.enqueue(call)) for call in calls]
            await until_it_waits(admin, 2)
            await session.rollback()
            told = await asyncio.gather(*waiting)
        assert {answer.id for answer in told[0]} == {answer.id for answer in told[1]}
        assert len({answer.id for answer in told[0]}) == 20


async def test_a_debounced_job_lets_the_next_of_its_ordering_key_run(storage: SqlStorage) -> None:
    """Jobs that stood aside for it need no longer wait, while it waits anew."""
    await storage.enqueue(
        [job("a", payload=b"1", ordering_key="o"), job("b", payload=b"1", ordering_key="o", deduplication=DEBOUNCE)]
    )
    await storage.enqueue([job("c", payload=b"1", ordering_key="o", delay=timedelta(milliseconds=1))])
    await storage.promote(["b"])
    await storage.promote(["c"])
    [claim] = await claim_all(storage)
    assert await claim_all(storage) == []
    await storage.settle([Completed(claim=claim, result=b"")])
    assert await storage.enqueue([keyed("other", DEBOUNCE)]) == [taken_by("b", JobState.SCHEDULED)]
    assert [claim.job_id for claim in await claim_all(storage)] == ["c"]


async def test_waiters_learn_that_a_debounced_job_is_due_earlier(storage: SqlStorage) -> None:
    """Who waits for the time that the first enqueue asked for wakes at the last one's."""
    async with storage.events():
        pass  # whoever listens for others' commits has begun to, and does not look once more because of that
    await storage.enqueue([keyed("first", DEBOUNCE)])
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    await storage.wait(["work"], timeout=timedelta(0))  # after the other one's look
    soon = Deduplication(key="key", mode=DeduplicationMode.DEBOUNCE, ttl=timedelta(milliseconds=200))
    await storage.enqueue([keyed("other", soon)])
    async with asyncio.timeout(PATIENCE):
        await waiting
    assert [claim.job_id for claim in await claim_all(storage)] == ["first"]


@on_postgres
async def test_a_debounce_waits_for_a_claim_of_its_job(
    storage: SqlStorage, admin: psycopg.Connection, engine: AsyncEngine
) -> None:
    """The payload goes to a job that has yet to run: a new one if the claim commits, the old one if it does not."""
    await storage.enqueue([keyed("first", DEBOUNCE)])
    for commits in (False, True):
        await storage.promote(["first"])
        async with engine.connect() as worker, asyncio.timeout(PATIENCE):
            await worker.execute(
                text("SELECT * FROM workers_claim(1, 'w', '{work}', '{60000}', NULL, 1, '\\x00'::bytea, 1000)")
            )
            waiting = asyncio.create_task(storage.enqueue([keyed("second", DEBOUNCE, b"2")]))
            await until_it_waits(admin)
            await (worker.commit() if commits else worker.rollback())
            [answer] = await waiting
        assert (answer.id, answer.status is EnqueueStatus.QUEUED) == (("second", True) if commits else ("first", False))


@on_postgres
async def test_a_claim_passes_over_a_job_that_is_debounced(storage: SqlStorage, engine: AsyncEngine) -> None:
    """It does not wait for the transaction, and afterwards finds that the job waits anew."""
    await storage.enqueue([keyed("first", DEBOUNCE)])
    await storage.promote(["first"])
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await storage.enqueue([keyed("other", DEBOUNCE, b"2")], connection=session)
        assert await claim_all(storage) == []
        await session.commit()
    assert await claim_all(storage) == []
    await storage.promote(["first"])
    assert [claim.payload for claim in await claim_all(storage)] == [b"2"]


@on_postgres
@each_mode
async def test_a_key_taken_since_the_snapshot_can_be_tried_again(
    storage: SqlStorage, postgres_url: str, mode: Deduplication
) -> None:
    """A transaction above READ COMMITTED cannot see who has the key: it is undone, and nothing is inserted twice."""
    engine = create_async_engine(postgres_url, isolation_level="REPEATABLE READ")
    async with AsyncSession(engine) as session:
        await session.execute(text("SELECT count(*) FROM workers_jobs"))
        await storage.enqueue([keyed("first", mode)])
        with pytest.raises(StorageUnavailable):
            await storage.enqueue([keyed("second", mode)], connection=session)
        await session.rollback()
    await engine.dispose()
    assert sum((await storage.counts()).values()) == 1


@on_postgres
async def test_an_id_that_another_inserts_first_takes_no_key(
    storage: SqlStorage, engine: AsyncEngine, admin: psycopg.Connection
) -> None:
    """Of a group whose first id turns out to exist, the next job has the key."""
    async with AsyncSession(engine) as session, asyncio.timeout(PATIENCE):
        await storage.enqueue([job("a")], connection=session)
        waiting = asyncio.create_task(storage.enqueue([keyed("a", SIMPLE), keyed("b", SIMPLE)]))
        await until_it_waits(admin)
        await session.commit()
        assert await waiting == [taken_by("a"), EnqueueResult(id="b", status=EnqueueStatus.QUEUED)]
    assert await storage.enqueue([keyed("c", SIMPLE)]) == [taken_by("b")]


# What stays behind, and what it costs


async def test_only_throttled_keys_have_marks(url: str, storage: SqlStorage) -> None:
    """Neither taking a key nor being told who has it leaves a row by the other modes; those that are over are swept."""
    short = Deduplication(key="short", mode=DeduplicationMode.THROTTLE, ttl=timedelta(milliseconds=1))
    for number in range(3):
        await storage.enqueue(
            [
                keyed(f"{number} simple", Deduplication(key="s")),
                keyed(f"{number} debounce", Deduplication(key="d", mode=DeduplicationMode.DEBOUNCE, ttl=MINUTE)),
                keyed(f"{number} throttle", Deduplication(key="t", mode=DeduplicationMode.THROTTLE, ttl=MINUTE)),
            ]
        )
    over = [Deduplication(key=f"short {number}", mode=short.mode, ttl=short.ttl) for number in range(5)]
    await storage.enqueue([keyed(key.key, key) for key in over])
    assert sorted(marks(url)) == [*((key.key, key.key) for key in over), ("t", "0 throttle")]
    swept: list[int] = []

    async def all_are_swept() -> bool:
        swept.append(await storage.sweep(2))
        return sum(swept) >= 5

    await until(all_are_swept)
    assert max(swept) == 2
    assert marks(url) == [("t", "0 throttle")]


async def test_an_ended_mark_gives_way_to_another_mode(url: str, storage: SqlStorage) -> None:
    """A key whose time is over is free though no sweep has been, and the sweep then takes nobody's key."""
    short = Deduplication(key="key", mode=DeduplicationMode.THROTTLE, ttl=timedelta(milliseconds=1))
    await storage.enqueue([keyed("first", short)])

    async def is_free() -> bool:
        [answer] = await storage.enqueue([keyed("second", SIMPLE)])
        return answer.status is EnqueueStatus.QUEUED

    await until(is_free)
    await storage.sweep(10)
    assert marks(url) == []
    assert await storage.enqueue([keyed("third", SIMPLE)]) == [taken_by("second")]


@on_postgres
async def test_no_look_for_a_key_reads_more_of_a_long_queue(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """With 4 000 keys taken, and statistics of a time without any, each enqueue fetches its own rows and no others."""
    admin.execute("ANALYZE")
    keys = [Deduplication(key=f"{number}") for number in range(4_000)]
    await storage.enqueue([keyed(f"{number}", key) for number, key in enumerate(keys)])
    before = await rows_read(storage, admin)
    for number in range(50):
        [again] = await storage.enqueue([keyed("again", keys[number])])
        assert again.id == str(number)
        await storage.enqueue([keyed(f"new {number}", Deduplication(key=f"new {number}"))])
    assert await rows_read(storage, admin) - before < 2_000
