"""The promises of `read`: what can be known of a job that failed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from workers.jobs import FAILURES_KEPT, Claim, ErrorInfo, Failed, FailedAttempt, JobRecord, JobState, Retried
from workers.storage.base import Storage
from workers.testing.case import LOST_ATTEMPTS_NOTED, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    apply,
    claim_one,
    completed,
    continued,
    crash,
    enqueue,
    failed,
    job,
    recover,
    retried,
    snoozed,
)

RAN = timedelta(milliseconds=250)
LAST = ErrorInfo(type="KeyError", message="'bob'", stack="Traceback ...", exhausted=True)


async def _record(storage: Storage, job_id: str) -> JobRecord:
    [found] = await storage.read([job_id])
    assert found is not None, f"{job_id!r} should be known"
    return found


def _told(failures: tuple[FailedAttempt, ...]) -> list[tuple[int, str | None, str]]:
    return [(one.attempt, one.worker_id, one.error_type) for one in failures]


async def _fail_once(storage: Storage, worker_id: str = "worker") -> Claim:
    held = await claim_one(storage, worker_id=worker_id)
    await apply(storage, retried(held))
    return held


@case(guarantees=(26,))
async def a_failed_job_can_be_read_whole(harness: Harness, storage: Storage) -> None:
    """Payload, last error with its stack, and each attempt with its worker, times and error."""
    payload = b'{"to": "bob"}'
    await enqueue(storage, job("job", payload=payload, max_attempts=2))
    first = await claim_one(storage, worker_id="one")
    await apply(storage, Retried(claim=first, delay=timedelta(0), error=ERROR, duration=RAN))
    second = await claim_one(storage, worker_id="two")
    await apply(storage, Failed(claim=second, error=LAST, duration=RAN))
    found = await _record(storage, "job")
    assert (found.status.state, found.status.last_error) == (JobState.FAILED, LAST)
    assert (found.payload, found.result) == (payload, None)
    assert _told(found.failures) == [(1, "one", ERROR.type), (2, "two", LAST.type)]
    assert [one.message for one in found.failures] == [ERROR.message, LAST.message]
    for one in found.failures:
        assert one.started_at is not None
        assert one.ended_at - one.started_at == RAN
        assert abs((one.ended_at - harness.now()).total_seconds()) < 5


@case(guarantees=(21, 26))
async def every_job_can_be_read(storage: Storage) -> None:
    """`read` answers in the order asked, None for an unknown id; a payload until the job completes, then its result."""
    await enqueue(storage, job("done", payload=b"[1]"))
    await apply(storage, completed(await claim_one(storage), b"[2]"))
    await enqueue(storage, job("waits", payload=b"\xff\x00"))
    waits, unknown, done = await storage.read(["waits", "unknown", "done"])
    assert unknown is None
    assert waits is not None
    assert done is not None
    assert (waits.payload, waits.result, waits.failures) == (b"\xff\x00", None, ())
    assert done.result == b"[2]"
    assert done.payload in (b"[1]", None)
    assert [waits.status, done.status] == await storage.status(["waits", "done"])
    assert await storage.read([]) == []


@case(guarantees=(26,))
async def many_large_jobs_are_read(storage: Storage) -> None:
    """However much they hold together, every job asked for is answered."""
    names = [f"job-{number}" for number in range(40)]
    payload = b'"' + b"x" * 100_000 + b'"'
    await enqueue(storage, *(job(name, payload=payload) for name in names))
    found = await storage.read(names)
    assert [one.status.id for one in found if one is not None] == names
    assert {one.payload for one in found if one is not None} == {payload}


@case(guarantees=(26,), needs=(LOST_ATTEMPTS_NOTED,))
async def lost_attempts_are_noted(harness: Harness, storage: Storage) -> None:
    """An attempt whose worker vanished is among those that failed, with that worker, whether or not it was the last."""
    await enqueue(storage, job("job", max_attempts=2))
    for _ in range(2):
        await crash(harness, storage)
        await recover(harness, storage, 1)
    found = await _record(storage, "job")
    assert found.status.state is JobState.FAILED
    assert _told(found.failures) == [(1, "worker", "StalledError"), (2, "worker", "StalledError")]
    assert [one.started_at for one in found.failures] == [None, None]


@case(guarantees=(12, 26))
async def the_last_failures_are_kept(storage: Storage) -> None:
    """Of a job that fails again and again, the last 20 attempts are kept, and little of each error."""
    await enqueue(storage, job("job", max_attempts=100))
    long = replace(ERROR, message="x" * 2_000)
    for _ in range(FAILURES_KEPT + 3):
        held = await claim_one(storage)
        await apply(storage, Retried(claim=held, delay=timedelta(0), error=long))
    found = (await _record(storage, "job")).failures
    assert [one.attempt for one in found] == list(range(4, FAILURES_KEPT + 4))
    assert max(len(one.message) for one in found) < 500


@case(guarantees=(4, 26))
async def what_does_not_count_is_no_failed_attempt(storage: Storage) -> None:
    """An uncounted retry, and a job that was snoozed, leave no failed attempt behind."""
    await enqueue(storage, job("job"))
    await apply(storage, retried(await claim_one(storage), counted=False))
    await apply(storage, snoozed(await claim_one(storage)))
    assert (await _record(storage, "job")).failures == ()
    await _fail_once(storage)
    assert _told((await _record(storage, "job")).failures) == [(1, "worker", ERROR.type)]


@case(guarantees=(26,))
async def failures_begin_anew(storage: Storage) -> None:
    """A retry by an operator, a new generation and the next link of a chain have no failed attempts yet."""
    await enqueue(storage, job("job"))
    await _fail_once(storage)
    await apply(storage, failed(await claim_one(storage)))
    assert len((await _record(storage, "job")).failures) == 2
    assert await storage.retry(["job"]) == 1
    assert (await _record(storage, "job")).failures == ()
    await apply(storage, failed(await claim_one(storage)))
    await enqueue(storage, job("job"))
    assert (await _record(storage, "job")).failures == ()
    await _fail_once(storage)
    await apply(storage, continued(await claim_one(storage)))
    assert (await _record(storage, "job")).failures == ()


@case(guarantees=(3, 26))
async def only_the_holder_is_noted(storage: Storage) -> None:
    """A settlement by a claim that lost its job, or a repeated one, adds no failed attempt."""
    await enqueue(storage, job("job"))
    held = await _fail_once(storage)
    await storage.settle([retried(held), retried(held)])
    again = await claim_one(storage)
    await storage.settle([failed(held)])
    assert _told((await _record(storage, "job")).failures) == [(1, "worker", ERROR.type)]
    await apply(storage, failed(again))
    assert [one.attempt for one in (await _record(storage, "job")).failures] == [1, 2]
