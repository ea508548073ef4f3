"""The promises of `progress`."""

from __future__ import annotations

from workers.jobs import Claim, JobEventKind, ProgressReport
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    expect,
    failed,
    job,
    recover,
    released,
    retried,
    status,
)

MOST = b'"' + b"x" * 4_094 + b'"'


def report(held: Claim, value: bytes) -> ProgressReport:
    return ProgressReport(claim=held, value=value)


async def progress_of(storage: Storage, job_id: str) -> bytes | None:
    """Return what was last reported for the job, which must exist."""
    return (await status(storage, job_id)).encoded_progress


@case(guarantees=(21,))
async def it_is_read_by_others(storage: Storage, other: Storage) -> None:
    """The progress that a claim reports is in the status of its job, for other clients too, byte for byte."""
    await enqueue(storage, job("one"), job("two"), job("silent"))
    one, two, _ = await claim(storage, 3)
    await storage.progress([report(one, b'{"done":0.5}'), report(two, MOST)])
    assert await progress_of(other, "one") == b'{"done":0.5}'
    assert await progress_of(other, "two") == MOST
    assert await progress_of(other, "silent") is None


@case(guarantees=(21,))
async def the_last_report_counts(storage: Storage) -> None:
    """A later report replaces an earlier one, in one call or in two; a call without reports changes nothing."""
    await enqueue(storage, job("job"))
    held = await claim_one(storage)
    await storage.progress([report(held, b"1"), report(held, b"2")])
    assert await progress_of(storage, "job") == b"2"
    await storage.progress([])
    await storage.progress([report(held, b"null")])
    assert await progress_of(storage, "job") == b"null"


@case(guarantees=(20, 21))
async def it_is_told_to_subscribers(storage: Storage, other: Storage) -> None:
    """A subscriber on another client hears of progress and can read it then."""
    await enqueue(storage, job("job"))
    held = await claim_one(storage)
    async with other.subscribe("job") as subscription:
        await storage.progress([report(held, b"50")])
        await expect(subscription, JobEventKind.PROGRESS)
        assert await progress_of(other, "job") == b"50"


@case(guarantees=(3, 21))
async def an_old_token_reports_nothing(harness: Harness, storage: Storage) -> None:
    """A claim that lost its job, or settled it, can no longer report progress, and does not keep others from it."""
    await enqueue(storage, job("lost"), job("done"), job("live"))
    (lost,) = await crash(harness, storage)
    await recover(harness, storage, 1)
    again, done, live = sorted(await claim(storage, 3), key=lambda held: "lost done live".index(held.job_id))
    await apply(storage, completed(done, b"1"))
    await storage.progress([report(lost, b"1"), report(done, b"1"), report(live, b"1")])
    assert await progress_of(storage, "lost") is None
    assert await progress_of(storage, "done") is None
    assert await progress_of(storage, "live") == b"1"
    await storage.progress([report(again, b"2"), report(lost, b"1")])
    assert await progress_of(storage, "lost") == b"2"


@case(guarantees=(21,))
async def it_outlives_the_attempt(harness: Harness, storage: Storage) -> None:
    """Released, retried, recovered and finished jobs keep the progress reported last, beside their result or error."""
    await enqueue(storage, job("job", max_attempts=5))
    for end in (released, retried):
        held = await claim_one(storage)
        await storage.progress([report(held, b"1")])
        await apply(storage, end(held))
        assert await progress_of(storage, "job") == b"1"
    held = await claim_one(storage, lease=harness.moment)
    await storage.progress([report(held, b"2")])
    await harness.advance(harness.moment)
    await recover(harness, storage, 1)
    assert await progress_of(storage, "job") == b"2"
    await apply(storage, completed(await claim_one(storage), b"result"))
    assert await progress_of(storage, "job") == b"2"
    outcome = await storage.result("job")
    assert outcome is not None
    assert outcome.result == b"result"


@case(guarantees=(2, 12))
async def it_goes_with_the_record(storage: Storage) -> None:
    """A new generation of a failed job begins without progress, by another enqueue or by an operator's retry."""
    await enqueue(storage, job("again"), job("retried"))
    for held in await claim(storage, 2):
        await storage.progress([report(held, b"99")])
        await apply(storage, failed(held))
    assert await progress_of(storage, "again") == await progress_of(storage, "retried") == b"99"
    await enqueue(storage, job("again"))
    assert await storage.retry(["retried"]) == 1
    assert await progress_of(storage, "again") is await progress_of(storage, "retried") is None
