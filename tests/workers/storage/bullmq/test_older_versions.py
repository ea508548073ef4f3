"""What a version left on a queue of BullMQ's that kept no record of a cancelled job, and what it makes of ours."""

from __future__ import annotations

from typing import Any

from workers.jobs import Cancelled, JobEventKind, JobOutcome, JobState, OutcomeKind
from workers.storage.bullmq import BullMQStorage
from workers.storage.on_redis.node_values import ERROR_FIELD, decode_error
from workers.testing.steps import LEASE, apply, claim_one, enqueue, expect, failed, job


async def test_a_tombstone_is_read_as_one(storage: BullMQStorage, client: Any) -> None:
    """It says that the job was cancelled; it is neither counted nor listed, and an enqueue takes it away."""
    for name in ("old", "again"):
        await client.set(f"bull:{storage.queue}:workers:cancelled:{name}", 1, px=3_600_000)
    assert await storage.result("old") == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert await storage.status(["old"]) == [None]
    assert (await storage.counts())[JobState.CANCELLED] == 0
    assert await storage.retry(["old"]) == 0
    await enqueue(storage, job("again"))
    assert await storage.result("again") is None


async def test_older_versions_read_the_error_they_know(storage: BullMQStorage, client: Any) -> None:
    """A cancelled job is a failed one with the error that they told waiters by, whether it waited or ran."""
    await enqueue(storage, job("ran"))
    (held,) = await storage.claim("w", leases={"*": LEASE}, limit=1)
    await enqueue(storage, job("waited"))
    await storage.cancel("waited")
    await storage.settle([Cancelled(claim=held)])
    for name in ("ran", "waited"):
        assert await client.zscore(f"bull:{storage.queue}:failed", name)
        fields = await client.hmget(f"bull:{storage.queue}:{name}", "failedReason", "stacktrace", ERROR_FIELD)
        error = decode_error(*fields, exhausted=False)
        assert error is not None
        assert (error.type, error.message) == ("JobCancelledError", f"job {name!r} was cancelled")


async def test_a_failure_after_an_older_versions_cancel_is_told(storage: BullMQStorage, client: Any) -> None:
    """Their event is not followed by one of a failed job: the next of that id is about its next generation."""
    async with storage.events() as events:
        await client.xadd(f"bull:{storage.queue}:events", {"event": "cancelled", "jobId": "job"})
        await enqueue(storage, job("job"))
        await apply(storage, failed(await claim_one(storage)))
        kinds = (JobEventKind.CANCELLED, JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.FAILED)
        await expect(events, *kinds)
