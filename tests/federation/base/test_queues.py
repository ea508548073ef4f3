"""Queues: BullMQ's options, the defaults of both queues as they are stored, and where queues are opened."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from federation.app import Federation
from federation.base.errors import ConfigurationError
from federation.base.queues import (
    DELIVERY_QUEUE_NAME,
    HEALTH_CHECK_QUEUE_NAME,
    BullQueue,
    FederationDeliveryJob,
    HealthCheckJob,
    bullmq_url,
    delivery_queue,
    health_check_queue,
    keyless_redis_url,
    open_storage,
)
from federation.base.settings import Settings
from federation.health.schedule import HealthSchedule, health_check_id
from workers.bounds import MAX_DELAY
from workers.jobs import DROP, Claim, EnqueueStatus, NewJob
from workers.retry import RetryPolicy
from workers.storage.base import ANY_NAME
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.file import FileStorage
from workers.storage.memory import MemoryStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage

DATA = FederationDeliveryJob(
    delivery_job_id="d-1",
    target_url="https://b.example/api/auth/social/follows",
    server_url="https://b.example",
    payload='{"method":"FEDERATE"}',
)


def exact(seconds: float, multiplier: float) -> RetryPolicy:
    return RetryPolicy(initial=timedelta(seconds=seconds), multiplier=multiplier, maximum=MAX_DELAY, jitter=0)


@pytest.fixture
def queue() -> BullQueue:
    """The delivery queue, in memory."""
    return delivery_queue(Settings.from_values({}), MemoryStorage(queue=DELIVERY_QUEUE_NAME))


async def claimed(queue: BullQueue) -> Claim:
    """The one job, as a worker gets it."""
    (claim,) = await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=10)
    return claim


def on_bullmq(redis_url: str, prefix: str) -> Settings:
    return Settings.from_values({"REDIS_URL": redis_url, "FEDERATION_QUEUE_PREFIX": prefix})


async def stored(redis_url: str, key: str) -> dict[str, str]:
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        return cast("dict[str, str]", await redis.hgetall(key))


async def test_a_delivery_job_has_five_attempts_and_doubling_pauses_without_jitter(queue: BullQueue) -> None:
    """5, 10, 20 and 40 s; completed kept a day, failed ones a week."""
    await queue.add("deliver-follow", DATA.to_wire())
    claim = await claimed(queue)
    assert claim.backoff is not None
    assert [claim.backoff.delay(attempt).total_seconds() for attempt in range(1, 5)] == [5, 10, 20, 40]
    assert (claim.name, claim.max_attempts) == ("deliver-follow", 5)
    assert (claim.keep_completed, claim.keep_failed) == (timedelta(hours=24), timedelta(days=7))
    assert json.loads(claim.payload) == {
        "deliveryJobId": "d-1",
        "targetUrl": "https://b.example/api/auth/social/follows",
        "serverUrl": "https://b.example",
        "payload": '{"method":"FEDERATE"}',
    }


async def test_the_settings_change_the_defaults() -> None:
    """Attempts and the first pause are the operator's."""
    settings = Settings.from_values({"FEDERATION_DELIVERY_ATTEMPTS": 2, "FEDERATION_DELIVERY_BACKOFF": "1s"})
    queue = delivery_queue(settings, MemoryStorage())
    await queue.add("deliver-follow", {})
    claim = await claimed(queue)
    assert (claim.max_attempts, claim.backoff) == (2, exact(1, 2))


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
    queue: BullQueue, options: dict[str, object], expected: dict[str, object]
) -> None:
    """The job as claimed has what the option says, and the queue's defaults elsewhere."""
    await queue.add("deliver-post", {}, options)
    claim = await claimed(queue)
    assert {name: getattr(claim, name) for name in expected} == expected


async def test_a_delay_is_in_milliseconds(queue: BullQueue) -> None:
    """The job is due that much later, and not before."""
    added = await queue.add("deliver-post", {}, {"delay": 90_000})
    status = await queue.get_status(added.id)
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at == timedelta(seconds=90)
    assert await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=1) == []


async def test_lower_priorities_come_first(queue: BullQueue) -> None:
    """As BullMQ orders them, none before any."""
    for number in (5, 0, 1):
        await queue.add("deliver-post", {}, {"jobId": f"p{number}", "priority": number})
    claims = await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=10)
    assert [claim.job_id for claim in claims] == ["p0", "p1", "p5"]


async def test_adding_the_same_job_id_again_adds_nothing(queue: BullQueue) -> None:
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
    queue: BullQueue, options: dict[str, object], named: str
) -> None:
    """An unknown option or a value out of range adds nothing; of a batch, nothing at all."""
    with pytest.raises(ValueError, match=named):
        await queue.add_bulk([("deliver-post", {}, {}), ("deliver-post", {}, options)])
    assert sum((await queue.storage.counts()).values()) == 0


async def test_a_delivery_job_lies_in_redis_as_node_writes_it(redis_url: str, queue_prefix: str) -> None:
    """Name, data and options of a job added without options are those other implementations read."""
    queue = delivery_queue(*opened(redis_url, queue_prefix, DELIVERY_QUEUE_NAME))
    try:
        added = await queue.add("deliver-follow", DATA.to_wire(), {"jobId": "d-1"})
        fields = await stored(redis_url, f"{queue_prefix}:federation-delivery:{added.id}")
    finally:
        await queue.stop()
    assert fields["name"] == "deliver-follow"
    assert fields["data"] == json.dumps(DATA.to_wire(), separators=(",", ":"))
    options = json.loads(fields["opts"])
    assert options["attempts"] == 5
    assert (options["backoff"]["type"], options["backoff"]["delay"]) == ("exponential", 5000)
    assert "jitter" not in options["backoff"]
    assert options["removeOnComplete"] == {"age": 86400}
    assert options["removeOnFail"] == {"age": 604800}
    assert options.get("delay", 0) == 0


async def test_a_health_check_lies_in_redis_as_node_writes_it(redis_url: str, queue_prefix: str) -> None:
    """The agreed job id, a delay of five minutes, dropped when it ends, one attempt."""
    queue = health_check_queue(*opened(redis_url, queue_prefix, HEALTH_CHECK_QUEUE_NAME))
    schedule = HealthSchedule(queue, first_delay=timedelta(minutes=5), step=timedelta(minutes=10))
    try:
        await schedule("https://remote.example.com", 0)
        fields = await stored(redis_url, f"{queue_prefix}:federation-health-check:health-check_d4b64e4b29f0e3be_0")
    finally:
        await queue.stop()
    assert fields["name"] == "health-check"
    assert json.loads(fields["data"]) == {"serverUrl": "https://remote.example.com"}
    assert fields["delay"] == "300000"
    options = json.loads(fields["opts"])
    assert options["removeOnComplete"] is True
    assert options["removeOnFail"] is True
    assert options["delay"] == 300000
    assert options["attempts"] <= 1


def opened(redis_url: str, prefix: str, name: str) -> tuple[Settings, BullMQStorage]:
    settings = on_bullmq(redis_url, prefix)
    storage = open_storage(settings, name)
    assert isinstance(storage, BullMQStorage)
    return settings, storage


@pytest.mark.parametrize("attempt", range(5))
async def test_probe_n_is_due_after_five_plus_ten_n_minutes(attempt: int) -> None:
    """5, 15, 25, 35 and 45 minutes; scheduling the same probe again does nothing."""
    queue = health_check_queue(Settings.from_values({}), MemoryStorage())
    schedule = HealthSchedule(queue, first_delay=timedelta(minutes=5), step=timedelta(minutes=10))
    for _ in range(2):
        await schedule("https://remote.example.com", attempt)
    status = await queue.get_status(f"health-check_d4b64e4b29f0e3be_{attempt}")
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at == timedelta(minutes=5 + 10 * attempt)
    assert (status.name, status.max_attempts) == ("health-check", 1)
    assert sum((await queue.storage.counts()).values()) == 1


def test_a_probe_has_an_id_of_its_own_per_server_and_attempt() -> None:
    """The check value shared with other implementations, and different ids for different servers."""
    assert health_check_id("https://remote.example.com", 0) == "health-check_d4b64e4b29f0e3be_0"
    assert health_check_id("https://remote.example.com/", 0) != health_check_id("https://remote.example.com", 0)


def test_job_data_takes_either_spelling_in_python_and_is_camel_case_on_the_wire() -> None:
    """Snake case and camel case make the same job; the payload stays out of its repr."""
    wire = {"deliveryJobId": "d", "targetUrl": "t", "serverUrl": "s", "payload": "p4yload"}
    job = FederationDeliveryJob.model_validate(wire)
    assert job == FederationDeliveryJob(delivery_job_id="d", target_url="t", server_url="s", payload="p4yload")
    assert job.to_wire() == wire
    assert "p4yload" not in repr(job)
    assert HealthCheckJob(server_url="s").to_wire() == {"serverUrl": "s"}


@pytest.mark.parametrize(
    ("values", "kind", "redis"),
    [
        ({}, SqlStorage, None),
        ({"REDIS_URL": "redis://one:1/0"}, BullMQStorage, "redis://one:1/0"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "sqlite:///queue.db"}, SqlStorage, None),
        (
            {"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bullmq+redis://two:2/0"},
            BullMQStorage,
            "redis://two:2/0",
        ),
        ({"QUEUE_URL": "bullmq+rediss://two:2"}, BullMQStorage, "rediss://two:2"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "redis://two:2/0"}, RedisStorage, None),
        ({"QUEUE_URL": "rediss://two:2"}, RedisStorage, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bull+redis://two:2/0"}, BullStorage, None),
        ({"QUEUE_URL": "bull+rediss://two:2"}, BullStorage, None),
        ({"DATABASE_URL": "postgresql://db/x", "QUEUE_URL": "sqlite:///queue.db"}, SqlStorage, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "file:///var/queues"}, FileStorage, None),
        ({"DATABASE_URL": "postgresql://db/x", "REDIS_URL": "redis://one:1"}, BullMQStorage, "redis://one:1"),
        ({"DATABASE_URL": "postgres://db/x"}, SqlStorage, None),
        ({"QUEUE_URL": "postgresql://db/x", "REDIS_URL": "redis://one:1"}, SqlStorage, None),
    ],
)
def test_the_queue_storage_is_picked_by_scheme(
    values: dict[str, object], kind: type, redis: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUEUE_URL wins, then REDIS_URL, then the application's own database."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_values(values)
    storage = open_storage(settings, "some-queue")
    assert isinstance(storage, kind)
    assert storage.queue == "some-queue"
    assert bullmq_url(settings) == redis


@pytest.mark.parametrize(
    ("values", "redis"),
    [
        ({}, None),
        ({"REDIS_URL": "redis://one:1/0"}, "redis://one:1/0"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "redis://two:2/0"}, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bull+redis://two:2/0"}, "redis://two:2/0"),
        ({"QUEUE_URL": "bull+redis://two:2/0?dialect=C"}, "redis://two:2/0"),
        ({"QUEUE_URL": "bullmq+rediss://two:2"}, "rediss://two:2"),
    ],
    ids=["sqlite", "bullmq", "redis", "bull", "bull-dialect", "bullmq-tls"],
)
def test_marks_lie_beside_queues_that_keep_no_keys(values: dict[str, object], redis: str | None) -> None:
    """BullMQ's and Bull's Redis is where tasks are marked, whatever else there is."""
    assert keyless_redis_url(Settings.from_values(values)) == redis


async def test_queues_on_redis_are_apart_by_their_prefix(redis_url: str, queue_prefix: str) -> None:
    """Two nodes on one Redis do not get each other's jobs."""
    mine, theirs = (
        open_storage(Settings.from_values({"QUEUE_URL": redis_url, "FEDERATION_QUEUE_PREFIX": prefix}), "q")
        for prefix in (queue_prefix, f"{queue_prefix}-2")
    )
    for storage in (mine, theirs):
        await storage.connect()
    await mine.enqueue([NewJob(id="a", name="n", payload=b"")])
    leases = {ANY_NAME: timedelta(seconds=30)}
    assert await theirs.claim("w", leases=leases, limit=1) == []
    assert len(await mine.claim("w", leases=leases, limit=1)) == 1
    for storage in (mine, theirs):
        await storage.disconnect()


def test_a_queue_url_names_the_file_of_the_queue(tmp_path: Path) -> None:
    """Not the application's database."""
    settings = Settings.from_values(
        {"DATABASE_URL": f"sqlite:///{tmp_path}/app.db", "QUEUE_URL": f"sqlite:///{tmp_path}/queue.db"}
    )
    assert f"{tmp_path}/queue.db" in repr(open_storage(settings, "q"))


def test_a_queue_url_names_the_directory_of_the_queue(tmp_path: Path) -> None:
    """Its escapes are those of URLs."""
    settings = Settings.from_values({"QUEUE_URL": "file:///var/my%20queues"})
    assert repr(open_storage(settings, "q")) == "FileStorage('/var/my queues', queue='q')"


async def test_producers_and_workers_have_two_connections_of_their_own(redis_url: str, settings: Settings) -> None:
    """Each is made once; without a Redis there is none; beside queues elsewhere it is REDIS_URL's."""
    node = Federation(
        settings.model_copy(update={"redis_url": Settings.from_values({"REDIS_URL": redis_url}).redis_url})
    )
    try:
        assert node.redis is not None
        assert node.worker_redis is not None
        assert node.redis is node.redis
        assert node.redis is not node.worker_redis
        assert await node.redis.ping()
        assert await node.worker_redis.ping()
    finally:
        await node.close()
    without = Federation(settings)
    assert without.redis is None
    assert without.worker_redis is None
    await without.close()


async def test_the_raw_queue_is_bullmqs_own_on_the_same_keys(redis_url: str, queue_prefix: str) -> None:
    """A job added here is seen there; it is closed with the queue."""
    queue = delivery_queue(*opened(redis_url, queue_prefix, DELIVERY_QUEUE_NAME))
    try:
        await queue.add("deliver-follow", DATA.to_wire())
        assert queue.raw is queue.raw
        assert (await queue.raw.getJobCounts("waiting"))["waiting"] == 1
    finally:
        await queue.stop()


def test_there_is_no_raw_queue_elsewhere(queue: BullQueue) -> None:
    """The error names the variable that would give one."""
    with pytest.raises(ConfigurationError, match="REDIS_URL"):
        _ = queue.raw
