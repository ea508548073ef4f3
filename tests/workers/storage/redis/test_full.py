"""A server whose memory is full: it takes no new jobs, and works off those it has."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.redis.steps import LEASES
from workers import Deduplication, DeduplicationMode, Job, JobState, Worker, WorkerOptions
from workers.errors import StorageFull
from workers.jobs import DROP, CancelResult, Claim, Completed, Continued, ErrorInfo, Failed, PartlySettled, SettleStatus
from workers.storage.redis import RedisStorage, scripts
from workers.storage.redis.storage import RECORD_BYTES, SMALL_BYTES
from workers.testing.steps import HOUR, PATIENCE, claim_one, job, until

PAYLOAD = b"x" * 20_000
LARGE = b"r" * 30_000


class Server:
    """A server of the test's own, whose limit it moves."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def limit(self, limit: int) -> None:
        async with Redis.from_url(self.url) as admin:
            await admin.config_set("maxmemory", limit)

    async def leave(self, room: int) -> None:
        """It may take so many bytes more than it has."""
        async with Redis.from_url(self.url) as admin:
            used = (await admin.info("memory"))["used_memory"]
            await admin.config_set("maxmemory", used + room)


@pytest.fixture
def server(own_server: ValkeyProcess) -> Server:
    return Server(own_server.url)


@pytest.fixture
async def storage(server: Server) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(server.url, "full")
    await storage.connect()
    if not storage.capabilities.works_when_full:
        pytest.skip("a server before Redis 7 stays full")
    yield storage
    await storage.disconnect()


async def test_a_full_server_is_worked_off_and_takes_jobs_again(server: Server, storage: RedisStorage) -> None:
    """Filled to its real limit it refuses the next job; a worker does all that were acknowledged, and there is room."""
    await server.leave(2_000_000)
    taken: list[str] = []

    async def enqueue_for_ever() -> None:
        while True:
            job_id = uuid.uuid4().hex
            await storage.enqueue([job(job_id, payload=PAYLOAD)])
            taken.append(job_id)

    with pytest.raises(StorageFull, match="memory is full"):
        await enqueue_for_ever()
    assert len(taken) > 50
    done: list[str] = []

    async def run(one: Job) -> None:
        done.append(one.id)
        if len(done) == len(taken):
            worker.stop()

    worker = Worker(storage, {"*": run}, concurrency=5, options=WorkerOptions(payload_serde=Raw()))
    async with asyncio.timeout(PATIENCE):
        await worker.run()
    assert sorted(done) == sorted(taken)
    await storage.enqueue([job("after", payload=PAYLOAD)])
    assert (await storage.counts())[JobState.COMPLETED] == len(taken)


class Raw:
    """Payloads as they are."""

    def dumps(self, value: object) -> bytes:
        return b"null"

    def loads(self, data: bytes) -> object:
        return data


async def running(storage: RedisStorage, *payloads: bytes) -> list[Claim]:
    await storage.enqueue([job(f"job-{number}", payload=each) for number, each in enumerate(payloads)])
    return await storage.claim("w", leases=LEASES, limit=len(payloads))


async def test_what_stores_more_than_it_frees_waits_for_room(server: Server, storage: RedisStorage) -> None:
    """A large result for a small payload is not taken from a full server; its neighbours are, also by the next call."""
    large, small, dropped = await running(storage, b"", PAYLOAD, b"")
    await server.limit(1)
    ends = [
        Completed(claim=large, result=LARGE),
        Completed(claim=small, result=b"r" * len(PAYLOAD)),
        Completed(claim=dropped, result=LARGE, keep=DROP),
    ]
    with pytest.raises(PartlySettled) as refused:
        await storage.settle(ends)
    outcomes = [outcome and outcome.status for outcome in refused.value.outcomes]
    assert outcomes == [None, SettleStatus.APPLIED, SettleStatus.APPLIED]
    assert (await storage.renew([large])).lost == {}
    await server.limit(0)
    assert [one.status for one in await storage.settle(ends[:1])] == [SettleStatus.APPLIED]


async def test_nothing_slips_in_behind_what_frees_memory(server: Server, storage: RedisStorage) -> None:
    """Neither behind a job that goes without a trace, whose ordering key is free, nor in place of one that waited."""
    await storage.enqueue([job("first", ordering_key="key"), job("large"), job("waits", name="other")])
    first, large = await storage.claim("w", leases={"work": HOUR}, limit=5)
    await server.limit(1)
    with pytest.raises(PartlySettled) as refused:
        await storage.settle([Completed(claim=first, result=b"1", keep=DROP), Completed(claim=large, result=LARGE)])
    assert [outcome is not None for outcome in refused.value.outcomes] == [True, False]
    with pytest.raises(StorageFull):
        await storage.complete("waits", LARGE)
    assert await _is(storage, "waits", JobState.QUEUED)


async def test_a_worker_settles_again_when_there_is_room(server: Server, storage: RedisStorage) -> None:
    """A job whose result found no room ends with it later, without another run, and holds up no other job."""
    await storage.enqueue([job("large"), job("small", payload=b'"x"')])
    runs: list[str] = []
    ran = asyncio.Event()

    async def run(one: Job) -> object:
        runs.append(one.id)
        await ran.wait()
        return "r" * 30_000 if one.id == "large" else None

    worker = Worker(storage, {"*": run}, lease=timedelta(seconds=30))
    working = asyncio.create_task(worker.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: _both(runs))
        await server.limit(1)
        ran.set()
        await until(lambda: _is(storage, "small", JobState.COMPLETED))
        await until(lambda: _settles_one(worker))
        assert await _is(storage, "large", JobState.PROCESSING)
        await server.limit(0)
        await until(lambda: _is(storage, "large", JobState.COMPLETED))
        worker.stop()
        await working
    assert sorted(runs) == ["large", "small"]


async def _both(runs: list[str]) -> bool:
    return len(runs) == 2


async def _settles_one(worker: Worker) -> bool:
    return worker.running == 1


async def _is(storage: RedisStorage, job_id: str, state: JobState) -> bool:
    [found] = await storage.status([job_id])
    return found is not None and found.state is state


async def test_continuations_on_a_full_server_need_the_room_they_free(server: Server, storage: RedisStorage) -> None:
    """The next job or link is taken if it is no larger than what goes for it, and otherwise waits."""
    claims = await running(storage, PAYLOAD, b"", PAYLOAD, b"")
    await server.limit(1)
    then = [job(f"then-{number}", payload=PAYLOAD[RECORD_BYTES + 8 :]) for number in range(4)]
    settlements = [
        Completed(claim=claims[0], result=b"1", then=then[0]),
        Completed(claim=claims[1], result=b"1", then=then[1]),
        Continued(claim=claims[2], then=replace(then[2], id=claims[2].job_id)),
        Continued(claim=claims[3], then=replace(then[3], id=claims[3].job_id)),
    ]
    with pytest.raises(PartlySettled) as refused:
        await storage.settle(settlements)
    applied = [outcome is not None for outcome in refused.value.outcomes]
    assert applied == [True, False, True, False]
    assert {(await claim_one(storage)).job_id for _ in range(2)} == {"job-2", "then-0"}


async def test_errors_are_stored_in_short_on_a_full_server(server: Server, storage: RedisStorage) -> None:
    """A failure always finds room: its stack is left out and its message cut."""
    [claim] = await running(storage, b"")
    await server.limit(1)
    error = ErrorInfo(type="ValueError", message="m" * 2_000, stack="s" * 8_000)
    [outcome] = await storage.settle([Failed(claim=claim, error=error)])
    assert outcome.status is SettleStatus.APPLIED
    [found] = await storage.status([claim.job_id])
    assert found is not None
    assert found.last_error == ErrorInfo(type="ValueError", message="m" * SMALL_BYTES)


async def test_a_server_that_may_be_too_old_stays_full(
    server: Server, storage: RedisStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it tells no version and does not know the flag, it is full, and not broken."""
    await running(storage, b"")
    await storage.disconnect()
    async with Redis.from_url(server.url) as admin:
        await admin.acl_setuser("app", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"],
                                categories=["+@all", "-@admin", "-@dangerous"])  # fmt: skip
    monkeypatch.setattr(scripts, "ON_A_FULL_SERVER", "#!lua flags=of-tomorrow\n")
    scripts._draining.cache_clear()
    untold = RedisStorage(server.url.replace("//", "//app:secret@"), "full")
    await untold.connect()
    await server.limit(1)
    with pytest.raises(StorageFull, match="Redis 7"):
        await untold.claim("w", leases=LEASES, limit=1)
    scripts._draining.cache_clear()
    await untold.disconnect()
    await storage.connect()


async def test_no_enqueue_slips_into_a_full_server(server: Server, storage: RedisStorage) -> None:
    """Neither beside an id that is enqueued anew, nor with a key to take over, nor beside results with keys to free."""
    key = Deduplication(key="key", mode=DeduplicationMode.DEBOUNCE, ttl=HOUR)
    await storage.enqueue([job("again"), replace(job("waits", name="other"), deduplication=key)])
    assert await storage.cancel("again") is CancelResult.CANCELLED
    simple = Deduplication(key="simple", mode=DeduplicationMode.SIMPLE)
    await storage.enqueue([replace(job("marked"), deduplication=simple)])
    claim = await claim_one(storage)
    await server.limit(1)
    for jobs in ([job("again"), job("new")], [replace(job("new", payload=PAYLOAD), deduplication=key)]):
        with pytest.raises(StorageFull):
            await storage.enqueue(jobs)
    with pytest.raises(StorageFull):
        await storage.settle([Completed(claim=claim, result=LARGE)])
    assert [found and found.state for found in await storage.status(["again", "waits", "new", "marked"])] == [
        JobState.CANCELLED,
        JobState.SCHEDULED,
        None,
        JobState.PROCESSING,
    ]
