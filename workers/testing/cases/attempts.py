"""The counting of attempts."""

from __future__ import annotations

from workers.jobs import UNCOUNTED_RETRIES, JobEventKind, JobState
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    apply,
    claim_one,
    completed,
    continued,
    crash,
    enqueue,
    expect,
    job,
    recover,
    released,
    retried,
    snoozed,
    status,
)


@case(guarantees=(4,))
async def an_attempt_counts_when_it_is_claimed(storage: Storage, other: Storage) -> None:
    """The attempt is counted before the claim is answered, where every client can see it."""
    await enqueue(storage, job("job"))
    assert (await status(storage, "job")).attempt == 0
    held = await claim_one(storage)
    assert held.attempt == 1
    assert (await status(other, "job")).attempt == 1


@case(guarantees=(4,))
async def every_counted_run_counts_once(harness: Harness, storage: Storage) -> None:
    """Counted retries and lost leases count one attempt each."""
    await enqueue(storage, job("job", max_attempts=10))
    await apply(storage, retried(await claim_one(storage)))
    (held,) = await crash(harness, storage)
    assert held.attempt == 2
    await recover(harness, storage, 1)
    assert (await status(storage, "job")).attempt == 2
    assert (await claim_one(storage)).attempt == 3


@case(guarantees=(4,))
async def a_release_gives_the_attempt_back(storage: Storage) -> None:
    """A released attempt does not count, however often it happens, and the job is queued at once."""
    await enqueue(storage, job("job", max_attempts=2))
    for _ in range(5):
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, released(held))
    found = await status(storage, "job")
    assert (found.state, found.attempt) == (JobState.QUEUED, 0)


@case(guarantees=(4,))
async def uncounted_retries_are_capped(storage: Storage) -> None:
    """100 uncounted retries in a row give their attempts back, the next one counts, and then another 100 are free."""
    await enqueue(storage, job("job", max_attempts=3))
    for _ in range(UNCOUNTED_RETRIES + 1):
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, retried(held, counted=False))
    for _ in range(2):
        held = await claim_one(storage)
        assert held.attempt == 2
        await apply(storage, retried(held, counted=False))


@case(guarantees=(4,))
async def a_capped_retry_can_be_the_last(storage: Storage) -> None:
    """An uncounted retry that counts after all fails the job if it was the last attempt."""
    await enqueue(storage, job("job", max_attempts=1))
    for _ in range(UNCOUNTED_RETRIES):
        await apply(storage, retried(await claim_one(storage), counted=False))
    await apply(storage, retried(await claim_one(storage), counted=False))
    given_up = await status(storage, "job")
    assert given_up.state is JobState.FAILED
    assert given_up.last_error is not None
    assert (given_up.last_error.type, given_up.last_error.message) == (ERROR.type, ERROR.message)
    assert given_up.last_error.exhausted


@case(guarantees=(4,))
async def a_counted_retry_starts_the_row_anew(storage: Storage) -> None:
    """After a counted retry, 100 more uncounted ones are free."""
    await enqueue(storage, job("job", max_attempts=5))
    for _ in range(60):
        await apply(storage, retried(await claim_one(storage), counted=False))
    await apply(storage, retried(await claim_one(storage)))
    for _ in range(60):
        held = await claim_one(storage)
        assert held.attempt == 2
        await apply(storage, retried(held, counted=False))


@case(guarantees=(4,))
async def snoozing_never_counts(storage: Storage) -> None:
    """A snoozed job was not tried, so it may be snoozed more than 100 times in a row."""
    await enqueue(storage, job("job", max_attempts=1))
    for _ in range(UNCOUNTED_RETRIES + 5):
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, snoozed(held))
    assert (await status(storage, "job")).attempt == 0


@case(guarantees=(4,))
async def postponing_does_not_start_the_row_anew(storage: Storage) -> None:
    """A postponement between uncounted retries neither adds to the 100 nor frees 100 more."""
    await enqueue(storage, job("job", max_attempts=3))
    for number in range(UNCOUNTED_RETRIES + 1):
        if number == UNCOUNTED_RETRIES // 2:
            await apply(storage, snoozed(await claim_one(storage)))
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, retried(held, counted=False))
    assert (await claim_one(storage)).attempt == 2


@case(guarantees=(17, 21))
async def a_claim_brings_the_error_of_the_attempt_before(storage: Storage) -> None:
    """An attempt after one that failed knows its error, also after a release; the next link of a chain has none yet."""
    await enqueue(storage, job("job"))
    first = await claim_one(storage)
    assert first.last_error is None
    await apply(storage, retried(first))
    second = await claim_one(storage)
    assert second.last_error == ERROR
    await apply(storage, released(second))
    third = await claim_one(storage)
    assert third.last_error == ERROR
    await apply(storage, continued(third))
    assert (await claim_one(storage)).last_error is None


@case(guarantees=(4, 21))
async def a_snooze_is_no_failure(storage: Storage) -> None:
    """A snoozed job is scheduled without an error, now and when it has completed."""
    await enqueue(storage, job("job"), job("other", delay=HOUR))
    await apply(storage, snoozed(await claim_one(storage), HOUR))
    found = await status(storage, "job")
    assert (found.state, found.attempt, found.last_error) == (JobState.SCHEDULED, 0, None)
    assert found.next_run_at is not None
    page = await storage.list(JobState.SCHEDULED)
    assert (await storage.counts())[JobState.SCHEDULED] == len(page.jobs) == 2
    await storage.promote(["job"])
    await apply(storage, completed(await claim_one(storage)))
    assert (await status(storage, "job")).last_error is None


@case(guarantees=(4, 21, 26))
async def a_snooze_hides_no_failure(storage: Storage) -> None:
    """A job that failed and was snoozed then is failing still, with the error and the attempts it had."""
    await enqueue(storage, job("job"))
    await apply(storage, retried(await claim_one(storage)))
    (before,) = await storage.read(["job"])
    assert before is not None
    await apply(storage, snoozed(await claim_one(storage), HOUR))
    (found,) = await storage.read(["job"])
    assert found is not None
    assert (found.status.state, found.status.attempt, found.status.last_error) == (JobState.FAILING, 1, ERROR)
    assert found.failures == before.failures
    assert (await storage.counts())[JobState.FAILING] == 1


@case(guarantees=(4, 20))
async def a_snooze_is_not_told_as_a_failure(storage: Storage) -> None:
    """Subscribers hear that a snoozed job is back in the queue, whether for now or for later."""
    async with storage.subscribe("job") as subscription:
        await enqueue(storage, job("job"))
        await apply(storage, snoozed(await claim_one(storage)))
        await apply(storage, snoozed(await claim_one(storage), HOUR))
        await storage.promote(["job"])
        await apply(storage, completed(await claim_one(storage)))
        kinds = (JobEventKind.QUEUED, JobEventKind.ACTIVE)
        await expect(subscription, *kinds, *kinds, *kinds, JobEventKind.COMPLETED)
