"""The options of BullMQ: what each changes in the job, what is refused, and the stock queue on the same keys."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from federation.base.errors import ConfigurationError
from federation.base.queues.queue import DELIVERY_QUEUE_NAME, JobQueue, delivery_queue
from tests.federation.base.conftest import DATA, claimed, opened
from workers.checks import MAX_DELAY
from workers.errors import Unsupported
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
        ({"removeOnComplete": 0, "removeOnFail": {"count": 0}}, {"keep_completed": DROP, "keep_failed": DROP}),
        ({"lifo": False, "parent": None, "sizeLimit": 1_000}, {"max_attempts": 5}),
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
        ({"timeout": 5}, "timeout"),
        ({"repeat": {"every": 1}}, "repeat"),
        ({"lifo": 1}, "lifo"),
        ({"sizeLimit": 1}, "sizeLimit"),
        ({"deduplication": {"ttl": 1}}, "deduplication"),
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
        ({"backoff": {"delay": 5}}, "backoff"),
        ({"backoff": {"type": "fixed", "delay": "soon"}}, "backoff.delay"),
        ({"backoff": {"type": "fixed", "delay": 1, "jitter": 2}}, "jitter"),
        ({"backoff": "exponential"}, "backoff"),
        ({"removeOnComplete": -1}, "removeOnComplete"),
        ({"removeOnComplete": {"days": 1}}, "removeOnComplete"),
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


@pytest.mark.parametrize(
    "option",
    [
        {"lifo": True},
        {"timestamp": 1},
        {"keepLogs": 5},
        {"stackTraceLimit": 0},
        {"parent": {"id": "p", "queue": "bull:q"}},
        {"failParentOnFailure": True},
        {"telemetry": {"metadata": "m"}},
        {"removeOnComplete": 100},
        {"removeOnFail": {"age": 1, "count": 2}},
        {"backoff": {"type": "jitterish", "delay": 5}},
        {"deduplication": {"id": "one", "keepLastIfActive": True}},
    ],
    ids=lambda option: ",".join(option),
)
async def test_what_only_bullmq_can_keep_is_refused_elsewhere(queue: JobQueue, option: dict[str, object]) -> None:
    """A storage that cannot keep an option names it, and adds nothing."""
    with pytest.raises(Unsupported, match=next(iter(option))):
        await queue.add("deliver-post", {}, option)
    assert sum((await queue.storage.counts()).values()) == 0


@pytest.mark.parametrize(
    "modes",
    [{}, {"ttl": 60_000}, {"ttl": 60_000, "extend": True, "replace": True}],
    ids=["simple", "throttle", "debounce"],
)
async def test_deduplication_is_the_storages_own(queue: JobQueue, modes: dict[str, object]) -> None:
    """BullMQ's three modes are those of a storage with deduplication keys: of two jobs with one id one is added."""
    options = {"deduplication": {"id": "one", **modes}}
    first, second = [await queue.add("deliver-post", {"n": n}, options) for n in range(2)]
    assert (second.status, second.id) == (EnqueueStatus.DUPLICATE, first.id)


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
