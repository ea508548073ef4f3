"""The options of BullMQ: what each changes in the job, what is refused, and the stock queue on the same keys."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from federation.base.errors import ConfigurationError
from federation.base.job_queue import JobQueue
from federation.base.queues import DELIVERY_QUEUE_NAME, delivery_queue
from tests.federation.base.conftest import DATA, claimed, opened
from workers.checks import MAX_DELAY
from workers.jobs import DROP, EnqueueStatus
from workers.retry import RetryPolicy
from workers.storage.base import ANY_NAME


def exact(seconds: float, multiplier: float) -> RetryPolicy:
    return RetryPolicy(initial=timedelta(seconds=seconds), multiplier=multiplier, maximum=MAX_DELAY, jitter=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"jobId": "mine"}, {"job_id": "mine"}),
        ({"attempts": 9}, {"max_attempts": 9}),
        ({"attempts": 0}, {"max_attempts": 1}),
        ({"priority": 7}, {"priority": 7}),
        ({"backoff": 1500}, {"backoff": exact(1.5, 1)}),
        ({"backoff": {"type": "fixed", "delay": 250}}, {"backoff": exact(0.25, 1)}),
        ({"backoff": {"type": "exponential", "delay": 3000}}, {"backoff": exact(3, 2)}),
        (
            {"backoff": {"type": "fixed", "delay": 1000, "jitter": 0.5}},
            {"backoff": RetryPolicy(initial=timedelta(seconds=1), multiplier=1, maximum=MAX_DELAY, jitter=0.5)},
        ),
        ({"removeOnComplete": True, "removeOnFail": True}, {"keep_completed": DROP, "keep_failed": DROP}),
        ({"removeOnComplete": {"age": 60}}, {"keep_completed": timedelta(seconds=60)}),
        ({"removeOnFail": {"age": 1.5}}, {"keep_failed": timedelta(seconds=1.5)}),
        ({"removeOnFail": False}, {"keep_failed": timedelta(days=36_500)}),
        ({"removeOnComplete": None}, {"keep_completed": timedelta(hours=24)}),
        ({}, {"max_attempts": 5, "priority": 0}),
    ],
)
async def test_each_option_of_bullmq_changes_its_part_of_the_job(
    queue: JobQueue, options: dict[str, object], expected: dict[str, object]
) -> None:
    """The job as claimed has what the option says, and the queue's defaults elsewhere."""
    await queue.add("deliver-post", {}, options)
    claim = await claimed(queue)
    assert {name: getattr(claim, name) for name in expected} == expected


async def test_a_delay_is_in_milliseconds(queue: JobQueue) -> None:
    """The job is due that much later, and not before."""
    added = await queue.add("deliver-post", {}, {"delay": 90_000})
    status = await queue.get_status(added.id)
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at == timedelta(seconds=90)
    assert await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=1) == []


async def test_lower_priorities_come_first(queue: JobQueue) -> None:
    """As BullMQ orders them, none before any."""
    for number in (5, 0, 1):
        await queue.add("deliver-post", {}, {"jobId": f"p{number}", "priority": number})
    claims = await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=10)
    assert [claim.job_id for claim in claims] == ["p0", "p1", "p5"]


async def test_adding_the_same_job_id_again_adds_nothing(queue: JobQueue) -> None:
    """The second call tells that the job is there, whatever its data."""
    first, second = [await queue.add("deliver-post", {"n": n}, {"jobId": "same"}) for n in range(2)]
    assert (first.status, second.status) == (EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE)
    assert json.loads((await claimed(queue)).payload) == {"n": 0}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lifo": True}, "lifo"),
        ({"repeat": {"every": 1}, "parent": {}}, "parent"),
        ({"jobId": 7}, "jobId"),
        ({"jobId": ""}, "job id"),
        ({"delay": -1}, "delay"),
        ({"delay": "5"}, "delay"),
        ({"delay": True}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": float("inf")}, "delay"),
        ({"delay": 2**54}, "delay"),
        ({"attempts": 1e300}, "attempts"),
        ({"attempts": None}, "attempts"),
        ({"priority": 2_097_152}, "priority"),
        ({"backoff": {"type": "custom"}}, "backoff"),
        ({"backoff": {"delay": 5}}, "backoff"),
        ({"backoff": {"type": "fixed", "delay": "soon"}}, "backoff.delay"),
        ({"backoff": {"type": "fixed", "delay": 1, "jitter": 2}}, "jitter"),
        ({"backoff": "exponential"}, "backoff"),
        ({"removeOnComplete": 100}, "removeOnComplete"),
        ({"removeOnComplete": {"age": 1, "count": 2}}, "removeOnComplete"),
        ({"removeOnFail": {"age": -1}}, "removeOnFail.age"),
        ({"removeOnFail": {"age": 0}}, "retention"),
    ],
)
async def test_what_bullmq_would_not_take_is_refused_and_named(
    queue: JobQueue, options: dict[str, object], named: str
) -> None:
    """An unknown option or a value out of range adds nothing; of a batch, nothing at all."""
    with pytest.raises(ValueError, match=named):
        await queue.add_bulk([("deliver-post", {}, {}), ("deliver-post", {}, options)])
    assert sum((await queue.storage.counts()).values()) == 0


async def test_the_raw_queue_is_bullmqs_own_on_the_same_keys(redis_url: str, queue_prefix: str) -> None:
    """A job added here is seen there; it is closed with the queue."""
    queue = delivery_queue(*opened(redis_url, queue_prefix, DELIVERY_QUEUE_NAME))
    try:
        await queue.add("deliver-follow", DATA.to_wire())
        assert queue.raw is queue.raw
        assert (await queue.raw.getJobCounts("waiting"))["waiting"] == 1
    finally:
        await queue.stop()


def test_there_is_no_raw_queue_elsewhere(queue: JobQueue) -> None:
    """The error names the variable that would give one."""
    with pytest.raises(ConfigurationError, match="REDIS_URL"):
        _ = queue.raw
