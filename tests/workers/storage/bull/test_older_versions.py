"""What a version left on a queue of Bull's that kept no record of a cancelled job, and what it makes of ours."""

from __future__ import annotations

from tests.workers.storage.bull.steps import LEASES, NodeBull
from workers.jobs import Cancelled, JobOutcome, JobState, OutcomeKind
from workers.storage.bull import BullStorage
from workers.storage.bull.codec import decode_error
from workers.testing.steps import enqueue, job


async def test_a_tombstone_is_read_as_one(storage: BullStorage, node: NodeBull) -> None:
    """It says that the job was cancelled; it is neither counted nor listed, and an enqueue takes it away."""
    seconds, _ = await node.client.time()
    until = (seconds + 3600) * 1_000
    await node.client.zadd(node.key("workers:cancelled"), {"old": until, "again": until})
    assert await storage.result("old") == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert await storage.status(["old"]) == [None]
    assert (await storage.counts())[JobState.CANCELLED] == 0
    assert (await storage.list(JobState.CANCELLED)).jobs == ()
    assert await storage.retry(["old"]) == 0
    await enqueue(storage, job("again"))
    assert await storage.result("again") is None
    assert await storage.result("old") is not None, "a look at it has not forgotten it"


async def test_older_versions_read_the_error_they_know(storage: BullStorage, node: NodeBull) -> None:
    """A cancelled job is a failed one with the error that they told waiters by, whether it waited or ran."""
    await enqueue(storage, job("ran"))
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await enqueue(storage, job("waited"))
    await storage.cancel("waited")
    await storage.settle([Cancelled(claim=held)])
    for name in ("ran", "waited"):
        assert await node.client.sismember(node.key("failed"), name)
        fields = await node.client.hmget(node.key(name), "failedReason", "stacktrace", "workers:error")
        reason, stacks, facts = (None if field is None else str(field).encode() for field in fields)
        error = decode_error(reason, stacks, facts, None, exhausted=False)
        assert error is not None
        assert (error.type, error.message) == ("JobCancelledError", f"job {name!r} was cancelled")
