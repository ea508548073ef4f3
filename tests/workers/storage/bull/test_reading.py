"""What dashboards and claims read of a Bull queue, whoever wrote it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tests.workers.storage.bull.steps import ERROR, NodeBull
from workers.jobs import JobState, Retried
from workers.retry import RetryPolicy
from workers.storage.bull import BullStorage
from workers.storage.bull.options import read_options
from workers.testing.steps import HOUR, PATIENCE, job, status


async def test_of_many_delayed_jobs_each_is_counted_as_what_it_is(storage: BullStorage) -> None:
    """Those that failed before are behind more of the others than one look takes."""
    await storage.enqueue([job(f"failing-{number}") for number in range(3)])
    claims = await storage.claim("w", leases={"*": HOUR}, limit=3)
    await storage.settle([Retried(claim=claim, delay=2 * HOUR, error=ERROR) for claim in claims])
    await storage.enqueue([job(f"scheduled-{number}", delay=HOUR) for number in range(1_001)])
    async with asyncio.timeout(PATIENCE):
        counts = await storage.counts()
    assert (counts[JobState.SCHEDULED], counts[JobState.FAILING], counts[JobState.QUEUED]) == (1_001, 3, 0)


async def test_progress_that_node_reports_is_shown_whatever_it_is(storage: BullStorage, node: NodeBull) -> None:
    """But for the 0 with which each job begins."""
    shown = {progress: await node.add(progress=progress) for progress in ("0", "-5", '"half"', "100")}
    found = {progress: (await status(storage, raw)).encoded_progress for progress, raw in shown.items()}
    assert found == {"0": None, "-5": b"-5", '"half"': b'"half"', "100": b"100"}


def test_options_are_parsed_once_unless_they_are_long() -> None:
    """Jobs of ours share theirs, which differ by the id alone; strangers' long ones take no memory."""
    short, long = b'"attempts":1}', b'"data":"%b"}' % (b"x" * 2_048)
    assert read_options(b"a", b'{"jobId":"a",' + short) is read_options(b"b", b'{"jobId":"b",' + short)
    assert read_options(b"a", b"{" + long) == read_options(b"a", b"{" + long)
    assert read_options(b"a", b"{" + long) is not read_options(b"a", b"{" + long)


def test_a_policy_that_no_job_of_ours_has_is_the_nearest_that_there_is() -> None:
    """Somebody may have written it into the options: junk never raises."""
    backoff = read_options(b"a", b'{"workers":{"backoff":[1000,0.5,9000,1.5]}}').backoff
    assert backoff == RetryPolicy(
        initial=timedelta(seconds=1), multiplier=1.0, maximum=timedelta(seconds=9), jitter=1.0
    )
