"""The counting of attempts."""

from __future__ import annotations

from datetime import timedelta

from workers.jobs import UNCOUNTED_RETRIES, Claim, JobState, Retried
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    apply,
    claim_one,
    crash,
    enqueue,
    job,
    recover,
    released,
    retried,
    status,
)


@case(guarantees=(4,))
async def an_attempt_counts_when_it_is_claimed(harness: Harness) -> None:
    """The attempt is counted before the claim is answered, where every client can see it."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    await enqueue(storage, job("job"))
    assert (await status(storage, "job")).attempt == 0
    held = await claim_one(storage)
    assert held.attempt == 1
    assert (await status(other, "job")).attempt == 1


@case(guarantees=(4,))
async def every_counted_run_counts_once(harness: Harness) -> None:
    """Counted retries and lost leases count one attempt each."""
    storage = await harness.open()
    await enqueue(storage, job("job", max_attempts=10))
    await apply(storage, retried(await claim_one(storage)))
    (held,) = await crash(harness, storage)
    assert held.attempt == 2
    await recover(harness, storage, 1)
    assert (await status(storage, "job")).attempt == 2
    assert (await claim_one(storage)).attempt == 3


@case(guarantees=(4,))
async def a_release_gives_the_attempt_back(harness: Harness) -> None:
    """A released attempt does not count, however often it happens, and the job is queued at once."""
    storage = await harness.open()
    await enqueue(storage, job("job", max_attempts=2))
    for _ in range(5):
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, released(held))
    found = await status(storage, "job")
    assert (found.state, found.attempt) == (JobState.QUEUED, 0)


@case(guarantees=(4,))
async def uncounted_retries_are_capped(harness: Harness) -> None:
    """100 uncounted retries in a row give their attempts back, the next one counts, and then another 100 are free."""
    storage = await harness.open()
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
async def a_capped_retry_can_be_the_last(harness: Harness) -> None:
    """An uncounted retry that counts after all fails the job if it was the last attempt."""
    storage = await harness.open()
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
async def a_counted_retry_starts_the_row_anew(harness: Harness) -> None:
    """After a counted retry, 100 more uncounted ones are free."""
    storage = await harness.open()
    await enqueue(storage, job("job", max_attempts=5))
    for _ in range(60):
        await apply(storage, retried(await claim_one(storage), counted=False))
    await apply(storage, retried(await claim_one(storage)))
    for _ in range(60):
        held = await claim_one(storage)
        assert held.attempt == 2
        await apply(storage, retried(held, counted=False))


@case(guarantees=(4,))
async def snoozing_never_counts(harness: Harness) -> None:
    """A snoozed job was not tried, so it may be snoozed more than 100 times in a row."""
    storage = await harness.open()
    await enqueue(storage, job("job", max_attempts=1))
    for _ in range(UNCOUNTED_RETRIES + 5):
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, _snoozed(held))
    assert (await status(storage, "job")).attempt == 0


@case(guarantees=(4,))
async def postponing_does_not_start_the_row_anew(harness: Harness) -> None:
    """A postponement between uncounted retries neither adds to the 100 nor frees 100 more."""
    storage = await harness.open()
    await enqueue(storage, job("job", max_attempts=3))
    for number in range(UNCOUNTED_RETRIES + 1):
        if number == UNCOUNTED_RETRIES // 2:
            await apply(storage, _snoozed(await claim_one(storage)))
        held = await claim_one(storage)
        assert held.attempt == 1
        await apply(storage, retried(held, counted=False))
    assert (await claim_one(storage)).attempt == 2


def _snoozed(held: Claim) -> Retried:
    return Retried(claim=held, delay=timedelta(0), error=ERROR, counted=False, snoozed=True)
