"""Crons as job schedulers; `tests/interop/test_node_crons.py` has what Node makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import bullmq
import pytest

from tests.patience import until
from tests.workers.storage.bullmq.steps import LEASES
from workers import JobState, Queue, Tasks
from workers.crons import Cron, Missed
from workers.errors import StorageError, Unsupported
from workers.jobs import DROP, Completed, Declared, NewJob, Recurrence
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.schedulers import BullMQCrons
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.bullmq.server import BullMQServer

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
SECONDLY = "* * * * * *"
YEARLY = "0 3 1 1 *"


def cron(name: str = "night", **settings: object) -> Cron:
    return Cron(**{"name": name, "job": "work", "pattern": YEARLY, **settings})  # type: ignore[arg-type]  # as given


def hourly(**settings: object) -> Cron:
    return cron(pattern=None, every=HOUR, **settings)


def as_found(one: Cron) -> Recurrence:
    """What a storage reads, which checks nothing."""
    return Recurrence(**{each.name: getattr(one, each.name) for each in fields(one)})


@pytest.fixture
async def other(redis_url: str, storage: BullMQStorage) -> AsyncIterator[BullMQStorage]:
    """The queue, as another process has it."""
    other = BullMQStorage(redis_url, storage.queue)
    await other.connect()
    yield other
    await other.disconnect()


@pytest.fixture
async def stock(redis_url: str, storage: BullMQStorage) -> AsyncIterator[bullmq.Queue]:
    """The queue, as another program has it."""
    queue = bullmq.Queue(storage.queue, {"connection": redis_url})
    yield queue
    await queue.close()


async def content(storage: BullMQStorage, client: Any) -> dict[str, object]:
    """All schedulers and their jobs, as they lie on the server."""
    base = f"bull:{storage.queue}:"
    sets = {name: await client.zrange(base + name, 0, -1, withscores=True) for name in ("repeat", "delayed")}
    hashes = [key async for key in client.scan_iter(f"{base}repeat:*", _type="hash")]
    return {**sets, **{key: await client.hgetall(key) for key in hashes}}


async def waiting(storage: BullMQStorage) -> list[str]:
    """The ids of the jobs that wait, due or not."""
    pages = [await storage.list(state) for state in (JobState.SCHEDULED, JobState.QUEUED)]
    return [job.id for page in pages for job in page.jobs]


async def due_of(storage: BullMQStorage) -> datetime:
    [found] = await storage.scheduled()
    return found.due


async def test_a_definition_is_kept_whole(storage: BullMQStorage) -> None:
    """Whatever its jobs are like, and of a period as of a pattern."""
    wanted = [
        cron("a", payload=b"\x00no json", max_attempts=7, priority=5, keep_completed=DROP, timezone="Asia/Kolkata"),
        hourly(name="b:c ä", payload=b"{}", version=4, keep_failed=timedelta(seconds=90)),
    ]
    for one in reversed(wanted):
        assert await storage.declare_cron(one) is Declared.STORED
    assert [one.cron for one in await storage.scheduled()] == [as_found(one) for one in wanted]


async def test_its_jobs_are_as_it_says(storage: BullMQStorage) -> None:
    """And count as ours: a lost lease is an attempt of them."""
    await storage.declare_cron(cron(pattern=SECONDLY, payload=b'{"n":1}', max_attempts=7, priority=5))
    await until(lambda: _is(storage, JobState.QUEUED, 1))
    [claim] = await storage.claim("w", leases=LEASES, limit=1)
    assert (claim.name, claim.payload, claim.max_attempts, claim.priority) == ("work", b'{"n":1}', 7, 5)
    assert claim.options.ours  # type: ignore[attr-defined]  # a BullMQClaim
    [following] = await waiting(storage)
    assert following > claim.job_id


async def _is(storage: BullMQStorage, state: JobState, count: int) -> bool:
    return (await storage.counts())[state] == count


async def test_the_first_time_of_a_period_is_after_the_first_period(storage: BullMQStorage) -> None:
    """As on other storages; also when the declaration comes exactly at a multiple of it."""
    before = time.time()
    await storage.declare_cron(hourly())
    assert before + 3_600 - 0.001 <= (await due_of(storage)).timestamp() <= time.time() + 3_600


async def test_what_is_declared_again_stays_as_it_is(storage: BullMQStorage, other: BullMQStorage, client: Any) -> None:
    """To the byte, whoever declares it; and after a tick there is one next job."""
    await storage.declare_cron(hourly())
    await storage.declare_cron(cron("yearly"))
    before = await content(storage, client)
    for one in (hourly(), cron("yearly")):
        assert await other.declare_cron(one) is Declared.KEPT
    assert await content(storage, client) == before
    await storage.promote(await waiting(storage))
    for claim in await storage.claim("w", leases=LEASES, limit=5):
        await storage.settle([Completed(claim=claim, result=b"null")])
    before = await content(storage, client)
    for one in (hourly(), cron("yearly")):
        assert await other.declare_cron(one) is Declared.KEPT
    assert await content(storage, client) == before
    assert len(await waiting(storage)) == 2


async def test_of_many_processes_one_stores_it(storage: BullMQStorage, other: BullMQStorage) -> None:
    """At one moment."""
    crons = [hourly(), cron("yearly"), cron("secondly", pattern=SECONDLY)]
    found = await asyncio.gather(*(one.declare_cron(each) for each in crons * 10 for one in (storage, other)))
    assert found.count(Declared.STORED) == 3
    assert found.count(Declared.KEPT) == 57
    assert len(await waiting(storage)) == 3


async def test_the_highest_version_counts(storage: BullMQStorage, other: BullMQStorage) -> None:
    """In whatever order; a different one of the same version changes nothing."""
    await storage.declare_cron(cron(version=2))
    assert await other.declare_cron(cron(version=1, pattern="0 4 1 1 *")) is Declared.KEPT
    assert await other.declare_cron(cron(version=2, pattern="0 4 1 1 *")) is Declared.DIFFERENT
    assert (await due_of(storage)).hour == 3
    assert await other.declare_cron(cron(version=3, pattern="0 5 1 1 *")) is Declared.STORED
    assert (await due_of(storage)).hour == 5
    assert len(await waiting(storage)) == 1


@pytest.mark.parametrize("first", [hourly(), cron()], ids=["period", "pattern"])
async def test_a_new_version_that_recurs_as_before_is_due_as_before(
    storage: BullMQStorage, client: Any, first: Cron
) -> None:
    """Its next job is the new version's; a period goes on in its rhythm, also after times that were missed."""
    await storage.declare_cron(first)
    due, jobs = await due_of(storage), await waiting(storage)
    rhythm = await client.hget(f"bull:{storage.queue}:repeat:night", "offset")
    times = {"pattern": first.pattern, "every": first.every}
    assert await storage.declare_cron(cron(version=2, payload=b'"new"', **times)) is Declared.STORED
    assert (await due_of(storage), await waiting(storage)) == (due, jobs)
    assert await client.hget(f"bull:{storage.queue}:repeat:night", "offset") == rhythm
    await storage.promote(jobs)
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    assert claim.payload == b'"new"'


async def test_another_period_counts_from_the_declaration(storage: BullMQStorage) -> None:
    """There is no job of the old one."""
    await storage.declare_cron(hourly())
    await storage.declare_cron(cron(pattern=None, every=2 * HOUR, version=2))
    assert timedelta(minutes=119) < await due_of(storage) - datetime.now(UTC) <= 2 * HOUR
    assert len(await waiting(storage)) == 1


async def test_a_time_that_is_due_is_not_lost_to_a_new_version(storage: BullMQStorage) -> None:
    """Its job waited for a worker; it is the new version's, of the same time."""
    await storage.declare_cron(cron(pattern=SECONDLY))
    await until(lambda: _is(storage, JobState.QUEUED, 1))
    jobs = await waiting(storage)
    await storage.declare_cron(cron(pattern=SECONDLY, version=2, payload=b'"new"'))
    assert await waiting(storage) == jobs
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    assert ([claim.job_id], claim.payload) == (jobs, b'"new"')


@pytest.mark.parametrize("first", [hourly(), cron()], ids=["period", "pattern"])
async def test_a_new_version_while_the_job_is_claimed(storage: BullMQStorage, client: Any, first: Cron) -> None:
    """Whoever claimed it has not added the next one yet, and adds none: each time has one job."""
    await storage.declare_cron(first)
    [job] = await waiting(storage)
    await storage.promote([job])
    claiming = BullMQScripts(storage.queue, "bull").claim("slow:", 10, int(time.time() * 1_000), count=1)
    await client.execute_command(*claiming)
    times = {"pattern": first.pattern, "every": first.every}
    assert await storage.declare_cron(cron(version=2, **times)) is Declared.STORED
    [following] = await waiting(storage)
    assert following > job

    async def back() -> bool:
        return job in (await storage.recover(10)).requeued

    await until(back)
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    assert claim.job_id == job
    assert await waiting(storage) == [following]


@pytest.mark.parametrize("change", ["ticked", "declared", "removed", "declared and removed"])
async def test_nothing_is_stored_over_what_changed_meanwhile(
    redis_url: str, storage: BullMQStorage, client: Any, change: str
) -> None:
    """A declaration that was decided before the change has no effect; it is decided anew."""
    server = BullMQServer(redis_url, timedelta(seconds=5))
    late = BullMQCrons(QueueAccess(server, BullMQScripts(storage.queue, "bull"), max_foreign_stalls=1))
    await server.open()
    try:
        if change != "declared and removed":
            await storage.declare_cron(hourly())
        seen = await late._look("night")
        if change == "ticked":
            await storage.promote(await waiting(storage))
            await storage.claim("w", leases=LEASES, limit=5)
        elif change == "declared":
            await storage.declare_cron(hourly(version=3))
        else:
            await storage.declare_cron(hourly())
            await storage.remove_cron("night")
        before = await content(storage, client)
        assert not await late._store(hourly(version=2), seen)
        assert await content(storage, client) == before
    finally:
        await server.close()


async def test_what_is_removed_stays_so_until_a_higher_version(storage: BullMQStorage, other: BullMQStorage) -> None:
    """Its next job goes with it; another queue has its own."""
    await storage.declare_cron(hourly(version=2))
    assert await other.remove_cron("night")
    assert not await other.remove_cron("night")
    assert await waiting(storage) == await storage.scheduled() == []
    for version in (1, 2):
        assert await storage.declare_cron(hourly(version=version)) is Declared.REMOVED
    assert await storage.declare_cron(hourly(version=3)) is Declared.STORED
    assert len(await waiting(storage)) == 1


async def test_what_another_program_removed_comes_back(storage: BullMQStorage, stock: bullmq.Queue) -> None:
    """It knows no versions."""
    await storage.declare_cron(hourly())
    await stock.removeJobScheduler("night")
    assert await storage.declare_cron(hourly()) is Declared.STORED


@pytest.mark.parametrize("first", [hourly(), cron()], ids=["period", "pattern"])
async def test_a_schedule_without_its_next_job_goes_on(storage: BullMQStorage, client: Any, first: Cron) -> None:
    """A program removed it; the next process that declares the cron adds one."""
    await storage.declare_cron(first)
    [job] = await waiting(storage)
    await client.zrem(f"bull:{storage.queue}:delayed", job)
    await client.delete(f"bull:{storage.queue}:{job}")
    assert await storage.declare_cron(first) is Declared.STORED
    assert len(await waiting(storage)) == 1


async def test_a_scheduler_of_another_program_is_its_own(
    storage: BullMQStorage, stock: bullmq.Queue, client: Any
) -> None:
    """It is listed, run and removed, but no declaration touches it."""
    options = {"attempts": 2, "priority": 3, "lifo": True, "backoff": {"type": "fixed", "delay": 5}}
    await stock.upsertJobScheduler("night", {"pattern": YEARLY}, "tick", {"n": 1}, options)
    await stock.upsertJobScheduler("bare", {"every": 300}, "tick")
    before = await content(storage, client)
    assert await storage.declare_cron(cron(version=9)) is Declared.FOREIGN
    assert await content(storage, client) == before
    bare, night = [one.cron for one in await storage.scheduled()]
    assert (bare.version, bare.job, bare.every, bare.max_attempts) == (0, "tick", timedelta(milliseconds=300), 1)
    assert (night.version, night.pattern, night.timezone, night.payload) == (0, YEARLY, "", b'{"n":1}')

    job = await storage.cron_job("night", "now:1")
    assert job is not None
    await storage.enqueue([job])
    made = await bullmq.Job.fromId(stock, await _raw(client, storage, job.id))
    assert {name: made.opts[name] for name in options} == options
    assert (made.name, made.data) == ("tick", {"n": 1})
    assert "workers" not in made.opts
    assert await storage.remove_cron("night")
    assert await storage.declare_cron(cron()) is Declared.STORED


async def _raw(client: Any, storage: BullMQStorage, job_id: str) -> str:
    """The id in Redis of the only job that has been made by hand."""
    prefix = f"bull:{storage.queue}:~"
    [key] = [key async for key in client.scan_iter(f"{prefix}*")]
    return str(key).removeprefix(f"bull:{storage.queue}:")


async def test_crons_of_a_queue(storage: BullMQStorage, other: BullMQStorage, caplog: pytest.LogCaptureFixture) -> None:
    """The verbs of `queue.crons`: what BullMQ cannot do is refused, the rest is as on every storage."""
    queue = Queue(storage)
    queue.crons.add(hourly(max_attempts=4))
    await queue.crons.declare()
    [found] = await queue.crons.list()
    assert (found.cron.name, found.paused, found.last) == ("night", False, None)
    job_id = await queue.crons.run_now("night")
    assert job_id is not None
    assert job_id.startswith("cron:night:now:")
    job = await queue.get_job(job_id)
    assert job is not None
    assert (job.payload, job.status.max_attempts) == (None, 4)
    assert await queue.crons.run_now("none") is None
    for verb in (queue.crons.pause, queue.crons.resume):
        with pytest.raises(Unsupported, match="cannot pause what recurs"):
            await verb("night")
    differing = Queue(other)
    differing.crons.add(hourly(max_attempts=5))
    await differing.crons.declare()
    assert "raise its version to replace it" in caplog.text
    assert await queue.crons.remove("night")
    await queue.crons.declare()
    assert "was removed and does not recur" in caplog.text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"missed": Missed.SKIP}, "leave `missed` out"),
        ({"missed": Missed.ALL}, "leave `missed` out"),
        ({"ordering_key": "one"}, "no ordering keys"),
        ({"priority": -1}, "no priority above 0"),
        ({"name": "night:17"}, "for one of a cron's jobs"),
    ],
)
async def test_what_bullmq_cannot_keep_is_refused_where_it_is_declared(settings: dict[str, Any], told: str) -> None:
    """Nothing is connected for that; nor is it stored by whoever asks the storage."""
    storage = BullMQStorage("redis://127.0.0.1:1", "q")
    with pytest.raises(Unsupported, match=told):
        Queue(storage).crons.add(cron(**settings))
    with pytest.raises(Unsupported, match=told):
        await storage.declare_cron(cron(**settings))


async def test_a_task_that_bullmq_cannot_keep_is_refused_where_it_is_declared() -> None:
    """By its decorator."""
    with pytest.raises(Unsupported, match="leave `missed` out"):
        Tasks(Queue(BullMQStorage("redis://127.0.0.1:1", "q"))).cron(every=HOUR, missed=Missed.ALL)(_nothing)


async def _nothing() -> None: ...


@pytest.mark.parametrize("key", ["repeat", "delayed", "events", "workers:removed-crons"])
async def test_a_key_in_the_way_is_met_before_anything_changes(storage: BullMQStorage, client: Any, key: str) -> None:
    """BullMQ's scripts would stop half-way."""
    base = f"bull:{storage.queue}:"
    await storage.declare_cron(hourly())
    await client.delete(base + key)
    await client.set(base + key, "x")
    before = sorted([one async for one in client.scan_iter(f"{base}*")])
    for step in (storage.declare_cron(hourly(version=2)), storage.remove_cron("night")):
        with pytest.raises(StorageError):
            await step
    assert sorted([one async for one in client.scan_iter(f"{base}*")]) == before


async def test_a_job_that_is_declared_due_waits_where_node_leaves_it(storage: BullMQStorage, client: Any) -> None:
    """While the queue is paused BullMQ 5 loses what lies in `wait`."""
    await storage.declare_cron(cron(pattern=SECONDLY))
    await until(lambda: _is(storage, JobState.QUEUED, 1))
    await storage.pause()
    await storage.declare_cron(cron(pattern=SECONDLY, version=2))
    assert not await client.exists(f"bull:{storage.queue}:wait")
    assert len(await waiting(storage)) == 1
    await storage.resume()
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    assert len(await waiting(storage)) == 1
    assert claim.name == "work"


@pytest.mark.parametrize("paused", [False, True])
async def test_a_drain_spares_what_recurs(storage: BullMQStorage, client: Any, paused: bool) -> None:
    """Due or not, wherever it stands among the others; of these none is left, and no place of one."""
    await storage.declare_cron(hourly())
    await storage.enqueue([NewJob(id=f"before-{at}", name="n", payload=b"1") for at in range(3)])
    for name in ("first", "second"):
        await storage.declare_cron(hourly(name=name))
        await storage.promote([job for job in await waiting(storage) if job.startswith(f"repeat:{name}:")])
        await storage.enqueue([NewJob(id=f"{name}-{at}", name="n", payload=b"1") for at in range(3)])
    if paused:
        await storage.pause()
    assert await storage.drain() == 9
    await storage.resume()
    assert len(await waiting(storage)) == 3
    assert await client.llen(f"bull:{storage.queue}:wait") == 2
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [claim.job_id.rpartition(":")[0] for claim in claims] == ["repeat:first", "repeat:second"]
    assert len(await waiting(storage)) == 3
