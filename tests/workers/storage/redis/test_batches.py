"""Many jobs, or large ones, at once on Redis: no step is larger than the server bears."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.workers.storage.redis.steps import ERROR, LEASES
from workers import JobState
from workers.jobs import (
    Completed,
    Continued,
    Failed,
    SettleStatus,
)
from workers.storage.on_redis import batches
from workers.storage.redis import RedisStorage
from workers.testing.steps import claim_one, job, until


async def test_a_claim_of_large_jobs_is_cut_short(storage: RedisStorage) -> None:
    """One claim brings little more than 8 MiB, the next ones the rest."""
    await storage.enqueue([job(f"large-{number}", payload=bytes(5 << 20)) for number in range(3)])
    claimed = [len(await storage.claim("w", leases=LEASES, limit=10)) for _ in range(3)]
    assert claimed == [2, 1, 0]


async def test_a_claim_of_more_than_a_script_takes_is_whole(storage: RedisStorage) -> None:
    """2 300 jobs come in one call, each with a token of its own."""
    for start in (0, 1_150):
        await storage.enqueue([job(f"job-{number:04}") for number in range(start, start + 1_150)])
    claims = await storage.claim("w", leases=LEASES, limit=5_000)
    assert [claim.job_id for claim in claims] == [f"job-{number:04}" for number in range(2_300)]
    assert len({claim.token for claim in claims}) == 2_300


async def test_a_page_goes_on_where_the_last_ended(storage: RedisStorage) -> None:
    """Jobs that leave between two pages, the last one seen included, hide none of those that stay."""
    await storage.enqueue([job(f"job-{number}") for number in range(8)])
    page = await storage.list(JobState.QUEUED, limit=4)
    assert [one.id for one in page.jobs] == [f"job-{number}" for number in range(4)]
    assert await storage.remove(["job-1", "job-3", "job-5"]) == 3
    page = await storage.list(JobState.QUEUED, cursor=page.cursor, limit=4)
    assert [one.id for one in page.jobs] == ["job-4", "job-6", "job-7"]
    assert page.cursor is None
    assert (await storage.counts())[JobState.QUEUED] == 5


async def test_a_page_is_filled_from_every_line_of_its_state(storage: RedisStorage) -> None:
    """Queued are those in line, and those delayed ones that are due by now; the next page has the rest."""
    ready, due = ([f"{line}-{number}" for number in range(9)] for line in ("ready", "due"))
    await storage.enqueue([*map(job, ready), *(job(each, delay=timedelta(milliseconds=1)) for each in due)])

    async def are_due() -> bool:
        return (await storage.counts())[JobState.QUEUED] == 18

    await until(are_due)
    first = await storage.list(JobState.QUEUED, limit=13)
    assert [one.id for one in first.jobs] == [*ready, *due[:4]]
    second = await storage.list(JobState.QUEUED, cursor=first.cursor, limit=13)
    assert ([one.id for one in second.jobs], second.cursor) == (due[4:], None)
    line = await storage.list(JobState.QUEUED, limit=9)  # the page is full where a line ends, and not the last
    assert [one.id for one in (await storage.list(JobState.QUEUED, cursor=line.cursor, limit=9)).jobs] == due
    assert (await storage.list(JobState.QUEUED, limit=18)).cursor is None


async def test_results_are_read_in_bounded_steps(storage: RedisStorage) -> None:
    """Many large results asked for at once take several answers, each caller having its own."""
    await storage.enqueue([job(f"job-{number}") for number in range(8)])
    claims = await storage.claim("w", leases=LEASES, limit=8)
    await storage.settle([Completed(claim=claim, result=claim.job_id.encode() * 100_000) for claim in claims])
    found = await asyncio.gather(*(storage.result(f"job-{number}") for number in range(10)))
    assert [end and end.result and end.result[:5] for end in found] == [b"job-%d" % at for at in range(8)] + [None] * 2


async def test_large_batches_are_sent_in_portions(storage: RedisStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer stands in its place, however the batch was cut."""
    monkeypatch.setattr(batches, "PORTION_BYTES", 100)
    jobs = [job(f"job-{number}", payload=bytes(number * 9)) for number in range(20)]
    assert [result.id for result in await storage.enqueue(jobs)] == [one.id for one in jobs]
    claims = await storage.claim("w", leases=LEASES, limit=20)
    assert [claim.payload for claim in claims] == [one.payload for one in jobs]
    outcomes = await storage.settle([Completed(claim=claim, result=claim.payload) for claim in (*claims, claims[0])])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 20 + [SettleStatus.ALREADY_APPLIED]


async def test_a_claim_settled_twice_in_one_call_is_settled_once(storage: RedisStorage) -> None:
    """The second settlement sees what the first has done, although both are of one batch."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    outcomes = await storage.settle([Completed(claim=claim, result=b"1"), Failed(claim=claim, error=ERROR)])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED]
    counts = await storage.counts()
    assert (counts[JobState.COMPLETED], counts[JobState.FAILED]) == (1, 0)


async def test_a_link_follows_what_has_ended_in_the_same_batch(storage: RedisStorage) -> None:
    """It need not wait: the end counts, although the batch is written later."""
    await storage.enqueue([job("first"), job("second")])
    first, second = await storage.claim("w", leases=LEASES, limit=2)
    link = replace(job("second"), after=("first",), chain_index=1)
    await storage.settle([Completed(claim=first, result=b"1"), Continued(claim=second, then=link)])
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=2)] == ["second"]
