"""Joins with values: a task that runs with the results of jobs that were enqueued with it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from workers import Job, JobFailedError, JobSpec, JobState, Queue, Retry, Tasks, UnrecoverableError, Unsupported
from workers.jobs import DROP
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.tasks import EnqueuedTask, TypedTask
from workers.testing import Harness
from workers.testing.steps import PATIENCE

PATIENT = timedelta(seconds=PATIENCE)


class App:
    """Tasks of a queue that works on them, ten at a time."""

    def __init__(self, queue: Queue) -> None:
        self.app = app = Tasks(queue)
        self.seen: list[list[object]] = []

        @app.task
        async def square(number: int) -> int:
            return number * number

        @app.task
        async def spell(number: int) -> str:
            return "one" if number == 1 else "many"

        @app.task
        async def refuse() -> int:
            raise UnrecoverableError("no such number")

        @app.task
        async def total(numbers: list[int], factor: int = 1) -> int:
            self.seen.append(list(numbers))
            return factor * sum(numbers)

        @app.task
        async def first_of(job: Job, numbers: list[int]) -> str:
            return f"{job.name} {job.attempt} {numbers[0]}"

        @app.task
        async def again(job: Job, numbers: list[int]) -> int:
            self.seen.append(numbers)
            if job.attempt < 2:
                raise Retry("once more", delay=timedelta(0))
            return len(numbers)

        self.square, self.spell, self.refuse = square, spell, refuse
        self.total, self.first_of, self.again = total, first_of, again


async def app_on(harness: Harness) -> App:
    storage = await harness.open()
    capabilities = storage.capabilities
    if not capabilities.dependencies and not capabilities.flows:
        pytest.skip("declared: dependencies, flows")
    return App(Queue(storage, concurrency=10))


async def test_a_join_gets_the_results_in_order(harness: Harness) -> None:
    """Of jobs of several tasks, however they end after each other; its own result is waited for as any."""
    one = await app_on(harness)
    parts = [one.square.options(priority=5).spec(3), one.square.spec(1), one.square.spec(2)]
    async with one.app:
        joined = await one.app.gather(parts, then=one.total)
        assert await joined.result(PATIENT) == 14
        assert one.seen == [[9, 1, 4]]
        other = await one.app.gather([one.square.spec(5)], then=one.first_of)
        assert await other.result(PATIENT) == "first_of 1 25"


async def test_each_attempt_reads_the_same(harness: Harness) -> None:
    """Also if the jobs that it joins left no record."""
    one = await app_on(harness)
    keep = DROP if one.app.queue.storage.capabilities.dependencies else timedelta(hours=1)
    parts = [
        JobSpec(name=spec.name, payload=spec.payload, keep_completed=keep)
        for spec in (one.square.spec(2), one.square.spec(3))
    ]
    async with one.app:
        assert await (await one.app.gather(parts, then=one.again)).result(PATIENT) == 2
    assert one.seen == [[4, 9], [4, 9]]


async def test_nothing_to_join_is_an_empty_list(harness: Harness) -> None:
    """The join runs at once."""
    one = await app_on(harness)
    async with one.app:
        assert await (await one.app.gather([], then=one.total)).result(PATIENT) == 0
    assert one.seen == [[]]


async def test_a_join_fails_with_a_job_before_it(harness: Harness) -> None:
    """It does not run."""
    one = await app_on(harness)
    async with one.app:
        joined = await one.app.gather([one.square.spec(1), one.refuse.spec()], then=one.total)
        with pytest.raises(JobFailedError):
            await joined.result(PATIENT)
    assert one.seen == []


async def test_a_result_that_the_join_refuses_is_named(harness: Harness) -> None:
    """By the id of its job, and for good: another attempt would read the same."""
    one = await app_on(harness)
    spec = one.spell.spec(1)
    odd = JobSpec(name=spec.name, payload=spec.payload, id="odd-one")
    async with one.app:
        joined = await one.app.gather([one.square.spec(1), odd, one.square.spec(2)], then=one.total)
        with pytest.raises(JobFailedError, match="refuses what it joins, of job 'odd-one'") as caught:
            await joined.result(PATIENT)
        assert "'one'" not in str(caught.value)
        found = await one.app.queue.get_job(joined.id)
    assert found is not None
    assert (found.status.attempt, found.status.state) == (1, JobState.FAILED)
    assert one.seen == []


async def test_a_result_that_is_gone_is_named() -> None:
    """As one that an operator did not wait for."""
    one = App(Queue(MemoryStorage()))
    queue = one.app.queue
    spec = one.square.spec(1)
    late = JobSpec(name=spec.name, payload=spec.payload, id="late", delay=timedelta(hours=1))
    joined = await one.app.gather([late], then=one.total)
    assert await queue.manage.promote([joined.id]) == 1
    async with one.app:
        with pytest.raises(JobFailedError, match="of job 'late', which it joins"):
            await joined.result(PATIENT)


async def test_all_are_part_of_the_callers_transaction(tmp_path: Path) -> None:
    """Committed or rolled back together."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    one = App(Queue(storage))
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with engine.connect() as connection:
        await one.app.gather([one.square.spec(1)], then=one.total, connection=connection)
        await connection.rollback()
    assert sum((await one.app.queue.counts()).values()) == 0
    async with engine.begin() as connection:
        joined = await one.app.gather([one.square.spec(2)], then=one.total, connection=connection)
    await engine.dispose()
    async with one.app:
        assert await joined.result(PATIENT) == 4


async def test_in_memory_a_drain_runs_all() -> None:
    """As everything else that a test enqueues."""
    one = App(Queue(MemoryStorage()))
    with one.app.in_memory() as memory:
        joined: EnqueuedTask[int] = await one.app.gather([one.square.spec(2), one.square.spec(3)], then=one.total)
        assert (await memory.drain()).completed == 3
        assert await joined.result(PATIENT) == 13


async def test_what_cannot_be_gathered_is_refused() -> None:
    """Before anything is stored."""
    one = App(Queue(MemoryStorage()))
    app, queue = one.app, one.app.queue

    @app.task
    async def needs_more(numbers: list[int], factor: int) -> int:
        return factor

    @app.task
    async def takes_nothing() -> int:
        return 0

    def join(task: object) -> TypedTask[[list[int]], int]:
        return task  # type: ignore[return-value]  # what a program without a checker may pass

    spec = one.square.spec(1)
    twice = JobSpec(name=spec.name, payload=spec.payload, id="twice")
    unique = one.square.options(unique=True).spec(1)
    follower = JobSpec(name=spec.name, payload=spec.payload, after=["other"])
    with pytest.raises(TypeError, match="no other: \\['factor'\\]"):
        await app.gather([spec], then=join(needs_more))
    with pytest.raises(TypeError, match="as its first argument"):
        await app.gather([spec], then=join(takes_nothing))
    with pytest.raises(TypeError, match="JobSpec"):
        await app.gather([5], then=one.total)  # type: ignore[list-item]  # likewise
    for parts in ([twice, twice], [unique], [follower]):
        with pytest.raises(ValueError, match="a job to gather"):
            await app.gather(parts, then=one.total)
    with pytest.raises(ValueError, match="was declared elsewhere"):
        await app.gather([spec], then=App(Queue(MemoryStorage())).total)
    assert sum((await queue.counts()).values()) == 0


async def test_a_storage_on_which_no_job_waits_is_named(harness: Harness) -> None:
    """Bull alone; and BullMQ joins no transaction."""
    storage = await harness.open()
    one = App(Queue(storage))
    capabilities = storage.capabilities
    if capabilities.dependencies:
        return
    connection = object() if capabilities.flows else None
    with pytest.raises(Unsupported, match="BullMQStorage" if capabilities.flows else "BullStorage"):
        await one.app.gather([one.square.spec(1)], then=one.total, connection=connection)
    assert sum((await one.app.queue.counts()).values()) == 0
