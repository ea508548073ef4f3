"""What recurs: rows that one of many callers replaces, and the jobs of that tick."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from workers.jobs import CronLook, CronRow, JobState, NewJob
from workers.storage.abilities import KeepsCrons
from workers.storage.base import Storage
from workers.testing.case import CRON_ROWS, CRONS, MOVES_TIME, case
from workers.testing.harness import Harness
from workers.testing.steps import HOUR, claim, claim_one, completed, ids, job, next_claim, settle, state


def keeper(storage: Storage) -> KeepsCrons:
    """Return the storage as what the case needs."""
    assert isinstance(storage, KeepsCrons)
    return storage


async def look(storage: Storage, *, due: bool = False) -> CronLook:
    """Look at what recurs."""
    return await keeper(storage).crons(due=due)


async def replace_row(storage: Storage, row: CronRow, *jobs: NewJob) -> bool:
    """Replace a row."""
    return await keeper(storage).replace_cron(row, jobs=jobs)


def row(name: str, revision: int, due: datetime | None, body: str = "{}") -> CronRow:
    """Make a row."""
    return CronRow(name=name, revision=revision, due=due, body=body)


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def a_row_is_kept_as_it_was_given(storage: Storage) -> None:
    """Whatever its name and body are; its time to the millisecond. Rows come by name."""
    due = (await look(storage)).now.replace(microsecond=123_000) + HOUR
    rows = [row("a", 1, due, '{"text": "\\u0000 \u00e4 \U0001f600"}'), row("b \u00e4:%{x}", 1, None)]
    for one in reversed(rows):
        assert await replace_row(storage, one)
    found = await look(storage)
    assert (list(found.rows), found.next_due) == (rows, due)


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def a_row_is_replaced_once_from_each_revision(storage: Storage, other: Storage) -> None:
    """Of twenty callers one does it, and only its jobs are enqueued; a repeated call has no effect."""
    now = (await look(storage)).now
    assert await replace_row(storage, row("a", 1, now))
    for revision in (2, 3):
        replaced = await asyncio.gather(
            *(
                replace_row(one, row("a", revision, now), job(f"{revision}-{number}"))
                for number in range(10)
                for one in (storage, other)
            )
        )
        assert sum(replaced) == 1
        assert len(await claim(storage, 30)) == 1
    assert not await replace_row(storage, row("a", 3, now), job("late"))
    assert not await replace_row(storage, row("a", 9, now), job("early"))
    assert not await replace_row(storage, row("unknown", 2, now), job("none"))
    assert await claim(storage, 30) == []


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def the_jobs_of_a_tick_are_jobs_as_any(storage: Storage) -> None:
    """They wake whoever waits. One whose id is known is not enqueued again; the row is replaced all the same."""
    now = (await look(storage)).now
    assert await replace_row(storage, row("a", 1, now))
    waiting = asyncio.create_task(next_claim(storage))
    await asyncio.sleep(0)
    assert await replace_row(storage, row("a", 2, now), job("first"))
    claimed = await waiting
    assert claimed.job_id == "first"
    assert await replace_row(storage, row("a", 3, now), job("first"), job("second"))
    assert ids(await claim(storage, 10)) == ["second"]
    await settle(storage, completed(claimed))
    assert await state(storage, "first") is JobState.COMPLETED


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def a_paused_queue_gets_the_jobs_of_a_tick(storage: Storage) -> None:
    """They wait, as all others do."""
    await storage.pause()
    assert await replace_row(storage, row("a", 1, None), job("first"))
    assert await claim(storage) == []
    await storage.resume()
    assert (await claim_one(storage)).job_id == "first"


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS, MOVES_TIME))
async def what_is_due_is_found(harness: Harness, storage: Storage) -> None:
    """The longest due first; what is never due, or later, is not among it, and says when the next look is worth it."""
    now = (await look(storage)).now.replace(microsecond=0)
    for name, hours in (("late", 3), ("soon", 1), ("between", 2)):
        assert await replace_row(storage, row(name, 1, now + hours * HOUR))
    assert await replace_row(storage, row("never", 1, None))
    assert (await look(storage, due=True)).rows == []
    assert (await look(storage, due=True)).next_due == now + HOUR
    await harness.advance(2 * HOUR + timedelta(minutes=1))
    found = await look(storage, due=True)
    assert [one.name for one in found.rows] == ["soon", "between"]
    assert found.now > now + 2 * HOUR


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def rows_belong_to_their_queue(harness: Harness) -> None:
    """Another queue of the same database has none of them, and may have one of the same name."""
    storage, other = await harness.open(), await harness.open()
    now = (await look(storage)).now
    assert await replace_row(storage, row("a", 1, now), job("mine"))
    assert (await look(other)).rows == []
    assert await replace_row(other, row("a", 1, now), job("theirs"))
    assert ids(await claim(storage, 10)) == ["mine"]


@case(guarantees=(28,), needs=(CRONS, CRON_ROWS))
async def rows_outlive_the_storage_object(harness: Harness, storage: Storage) -> None:
    """And whatever becomes of their jobs."""
    assert await replace_row(storage, row("a", 1, None), job("first"))
    await storage.remove(["first"])
    again = await harness.open(storage.queue)
    assert [one.revision for one in (await look(again)).rows] == [1]
