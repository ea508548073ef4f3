"""The promises of reading: `status`, `counts`, `list`, `workers`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from workers.jobs import JobState
from workers.storage.abilities import ListsInOrder, TakesLeave
from workers.storage.base import Storage
from workers.testing.case import FAREWELLS, ORDERED_LISTING, PRIORITY_ORDER, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    NAME,
    apply,
    claim,
    claim_one,
    completed,
    continued,
    enqueue,
    failed,
    ids,
    job,
    released,
    retried,
    status,
)


def _states(harness: Harness) -> list[JobState]:
    """Return the states in which the storage can have jobs."""
    return [one for one in JobState if one is not JobState.WAITING or harness.capabilities.dependencies]


async def _one_in_each_state(harness: Harness, storage: Storage) -> None:
    """Make one job `a-...` for each state."""
    started = (JobState.COMPLETED, JobState.FAILED, JobState.FAILING, JobState.PROCESSING)
    await enqueue(storage, job("a-cancelled"))
    await storage.cancel("a-cancelled")
    await enqueue(storage, *(job(f"a-{state}") for state in started))
    succeeding, hopeless, failing, _ = await claim(storage, len(started))
    await apply(storage, completed(succeeding), failed(hopeless), retried(failing, HOUR))
    await enqueue(storage, job("a-scheduled", delay=HOUR), job("a-queued", priority=3))
    if harness.capabilities.dependencies:
        await enqueue(storage, replace(job("a-waiting"), after=("a-processing",)))


@case(guarantees=(21, 23))
async def every_state_can_be_read(harness: Harness, storage: Storage) -> None:
    """`status` tells each job's state in the order asked, and None for an id it does not know."""
    await _one_in_each_state(harness, storage)
    found = await storage.status([*(f"a-{state}" for state in _states(harness)), "unknown", "a-queued"])
    assert [one.state if one else None for one in found] == [*_states(harness), None, JobState.QUEUED]
    assert await storage.status([]) == []


@case(guarantees=(21,))
async def a_status_tells_the_truth_about_time(harness: Harness, storage: Storage) -> None:
    """`created_at` is when the job was enqueued, whatever happened since; `next_run_at` is when it will be due."""
    before = harness.now()
    await enqueue(storage, job("job"), job("scheduled", delay=HOUR))
    created = (await status(storage, "job")).created_at
    assert abs((created - before).total_seconds()) < 5
    assert created.tzinfo is not None
    scheduled = await status(storage, "scheduled")
    assert scheduled.next_run_at is not None
    assert abs((scheduled.next_run_at - scheduled.created_at - HOUR).total_seconds()) < 1
    await harness.advance(harness.moment)
    held = await claim_one(storage)
    await apply(storage, retried(held, HOUR))
    assert held.created_at == created
    assert (await status(storage, "job")).created_at == created


@case(guarantees=(21,))
async def a_status_describes_the_job(storage: Storage) -> None:
    """`status` has the name, priority and attempts allowed; a waiting job has no worker, no end and no error."""
    await enqueue(storage, job("job", name="alpha", priority=9, max_attempts=4))
    found = await status(storage, "job")
    assert (found.id, found.name, found.priority, found.max_attempts) == ("job", "alpha", 9, 4)
    assert (found.attempt, found.worker_id, found.finished_at, found.last_error) == (0, None, None, None)
    assert found.next_run_at is None


@case(guarantees=(21,))
async def every_state_is_counted(harness: Harness, storage: Storage) -> None:
    """`counts` has every state, with the number of jobs in it."""
    assert await storage.counts() == dict.fromkeys(JobState, 0)
    await _one_in_each_state(harness, storage)
    await enqueue(storage, job(), job())
    one_each = dict.fromkeys(JobState, 0) | dict.fromkeys(_states(harness), 1)
    assert await storage.counts() == {**one_each, JobState.QUEUED: 3}


@case(guarantees=(16, 21))
async def a_due_job_counts_as_queued(harness: Harness, storage: Storage) -> None:
    """A delayed job that is due is queued for `counts` and `list` as well."""
    await enqueue(storage, job("soon", delay=harness.moment))
    await harness.advance(harness.moment)
    counts = await storage.counts()
    assert (counts[JobState.QUEUED], counts[JobState.SCHEDULED]) == (1, 0)
    assert [found.id for found in (await storage.list(JobState.QUEUED)).jobs] == ["soon"]


@case(guarantees=(21,))
async def every_state_is_listed(harness: Harness, storage: Storage) -> None:
    """`list` returns the jobs of the state asked for, with their status."""
    await _one_in_each_state(harness, storage)
    for wanted in _states(harness):
        page = await storage.list(wanted)
        assert [(found.id, found.state) for found in page.jobs] == [(f"a-{wanted}", wanted)]
        assert page.cursor is None


@case(guarantees=(21,))
async def a_listing_comes_in_pages(storage: Storage) -> None:
    """Pages of any size contain every job exactly once, and none is larger than asked for."""
    names = {f"job-{number}" for number in range(25)}
    await enqueue(storage, *(job(name) for name in sorted(names)))
    listed: list[str] = []
    cursor = None
    for _ in range(30):
        page = await storage.list(JobState.QUEUED, cursor=cursor, limit=7)
        assert len(page.jobs) <= 7
        listed += [found.id for found in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
    assert cursor is None
    assert len(listed) == 25
    assert set(listed) == names


@case(guarantees=(21,))
async def workers_are_listed(harness: Harness, storage: Storage) -> None:
    """A worker that claimed is listed with the number of jobs it holds."""
    await enqueue(storage, *(job() for _ in range(3)))
    held = await claim(storage, 2, worker_id="busy")
    await claim(storage, 1, worker_id="other")
    assert len(ids(held)) == 2
    workers = {worker.id: worker for worker in await storage.workers()}
    assert {name: worker.claims for name, worker in workers.items()} == {"busy": 2, "other": 1}
    assert abs((workers["busy"].seen_at - harness.now()).total_seconds()) < 5


@case(guarantees=(21,))
async def an_idle_worker_is_listed(storage: Storage) -> None:
    """One that claims in vain is heard of, also while the queue is paused."""
    await claim(storage, worker_id="idle")
    await storage.pause()
    await claim(storage, worker_id="kept waiting")
    assert {worker.id for worker in await storage.workers()} == {"idle", "kept waiting"}


@case(guarantees=(21,), needs=(FAREWELLS,))
async def a_worker_that_stops_is_listed_no_more(storage: Storage) -> None:
    """From its farewell on, until it claims again; others stay on the list, and an unknown one is no error."""
    await enqueue(storage, job(), job())
    await apply(storage, *(completed(held) for held in await claim(storage, 1, worker_id="goes")))
    await claim(storage, 1, worker_id="stays")
    for _ in range(2):
        await _farewell(storage, "goes")
        assert {worker.id: worker.claims for worker in await storage.workers()} == {"stays": 1}
    await claim(storage, 1, worker_id="goes")
    assert {worker.id for worker in await storage.workers()} == {"goes", "stays"}


async def _farewell(storage: Storage, worker_id: str) -> None:
    assert isinstance(storage, TakesLeave)
    await storage.farewell(worker_id)


@case(guarantees=(21,))
async def the_longest_wait_is_known(harness: Harness, storage: Storage) -> None:
    """`waiting_since` is when the job that has waited longest was enqueued; one that runs, or is not due, waits not."""
    assert await storage.waiting_since() is None
    await enqueue(storage, job("later", delay=HOUR))
    assert await storage.waiting_since() is None
    await enqueue(storage, job("first"))
    await harness.advance(harness.moment)
    await enqueue(storage, job("second", name="z"), job("third", name="a"))
    await _waits_since(storage, "first")
    first = await claim_one(storage)
    await _waits_since(storage, "second")
    await apply(storage, released(first))
    await _waits_since(storage, "first")
    await claim(storage, 3)
    assert await storage.waiting_since() is None


@case(guarantees=(21,), needs=(PRIORITY_ORDER,))
async def a_low_priority_hides_no_wait(harness: Harness, storage: Storage) -> None:
    """A job that everybody overtakes has waited longest."""
    await enqueue(storage, job("last", priority=9))
    await harness.advance(harness.moment)
    await enqueue(storage, job("first"))
    await _waits_since(storage, "last")


@case(guarantees=(16, 21))
async def a_due_job_waits_since_it_is_due(harness: Harness, storage: Storage) -> None:
    """A delayed job that is due has waited since then, and no longer."""
    await enqueue(storage, job("soon", delay=harness.moment))
    due = (await status(storage, "soon")).next_run_at
    await harness.advance(2 * harness.moment)
    since = await storage.waiting_since()
    assert since is not None
    assert due is not None
    assert abs(since - due) <= timedelta(milliseconds=5)


async def _waits_since(storage: Storage, job_id: str) -> None:
    since = await storage.waiting_since()
    assert since is not None
    assert abs(since - (await status(storage, job_id)).created_at) <= timedelta(milliseconds=5)


@case(guarantees=(21,), needs=(ORDERED_LISTING,))
async def the_oldest_of_a_name_are_listed_first(storage: Storage) -> None:
    """Jobs are listed by name, oldest first whatever their priority, page by page; a chain counts by its last link."""
    assert isinstance(storage, ListsInOrder)
    await enqueue(storage, job("chain", priority=0), job("other", name="mail", priority=1))
    await enqueue(storage, *(job(f"job-{number}", priority=9 - number) for number in range(5)))
    await apply(storage, continued(await claim_one(storage)))
    listed, cursor = list[str](), None
    while True:
        page = await storage.list_in_order(JobState.QUEUED, name=NAME, cursor=cursor, limit=2)
        listed += [found.id for found in page.jobs]
        if (cursor := page.cursor) is None:
            break
    assert listed == [*(f"job-{number}" for number in range(5)), "chain"]
    everything = (await storage.list_in_order(JobState.QUEUED)).jobs
    assert [found.id for found in everything] == ["other", *listed]
