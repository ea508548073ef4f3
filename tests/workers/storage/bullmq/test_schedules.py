"""Job schedulers after crashes, retries and other programs' mistakes; `tests/interop` has those of Node."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import bullmq
import pytest

from tests.servers import valkey
from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers import JobState
from workers.errors import StorageError
from workers.jobs import Completed, Continued, NewJob, Retried
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.record import make_claim
from workers.storage.bullmq.schedulers import Schedules
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.bullmq.server import BullMQServer
from workers.testing.steps import until

HOUR_MS = 3_600_000
Spoil = Callable[[Any, str, str], Awaitable[object]]


@pytest.fixture
async def job(storage: BullMQStorage, redis_url: str) -> AsyncIterator[str]:
    """The first job of the scheduler `s`, which recurs every hour, can be claimed."""
    queue = bullmq.Queue(storage.queue, {"connection": redis_url})
    made = await queue.upsertJobScheduler("s", {"every": HOUR_MS}, "tick", {"n": 1}, {"attempts": 2})
    assert made is not None
    yield str(made.id)
    await queue.close()


async def added(storage: BullMQStorage) -> list[str]:
    return [one.id for one in (await storage.list(JobState.SCHEDULED)).jobs]


async def test_a_worker_dies_before_it_adds_the_next(storage: BullMQStorage, client: Any, job: str) -> None:
    """Whoever gets the job when its lease is over adds it; whoever gets it after that does not."""
    lua = BullMQScripts(storage.queue, "bull")
    await client.execute_command(*lua.claim("dead:", 1, int(time.time() * 1_000), count=1))
    assert await added(storage) == []
    while not (await storage.recover(10)).requeued:
        pass
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    assert claim.job_id == job
    [following] = await added(storage)
    due = int(job.rpartition(":")[2])
    assert following == f"repeat:s:{due + HOUR_MS}"

    await storage.settle([Retried(claim=claim, delay=timedelta(0), error=ERROR)])
    [again] = await storage.claim("w", leases=LEASES, limit=5)
    assert (again.job_id, again.attempt) == (job, 2)  # a crash is no attempt of a job of Node
    assert await added(storage) == [following]
    assert await client.hget(f"bull:{storage.queue}:repeat:s", "ic") == "2"


async def test_the_next_link_of_a_chain_is_no_next_job(storage: BullMQStorage, job: str) -> None:
    """A job that went on as something else runs again, although it does not say any more how it recurs."""
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    following = await added(storage)
    then = NewJob(id=job, name="second", payload=b"{}", chain_index=1)
    await storage.settle([Continued(claim=claim, then=then)])
    [link] = await storage.claim("w", leases=LEASES, limit=5)
    assert link.name == "second"
    assert await added(storage) == following


async def test_no_other_claims_wait_for_schedulers(storage: BullMQStorage) -> None:
    """Claims without a job of a scheduler cost no request. When the server is gone, they may run all the same."""
    leases = {"*": timedelta(seconds=1)}
    plain, scheduled = ([["name", "rjk", *more], raw, 0, 0] for raw, more in (("a", []), ("b", ["rjk", "s"])))
    claims = [make_claim(reply, reply[1], "w", leases) for reply in (plain, scheduled)]
    with valkey() as server:
        own = BullMQServer(server.url, timedelta(seconds=1))
        access = QueueAccess(own, BullMQScripts("q", "bull"), max_foreign_stalls=1)
        await access.server.open()
    try:
        assert await Schedules(access).go_on(claims[:1], [plain, [0, 0, 0, 0]]) == claims[:1]
        assert await Schedules(access).go_on(claims, [plain, scheduled]) == claims[:1]
    finally:
        await access.server.close()


def options(**members: object) -> Spoil:
    """The job has these options."""

    async def spoil(client: Any, base: str, job: str) -> None:
        await client.hset(f"{base}{job}", "opts", json.dumps({"repeat": {"every": HOUR_MS, "count": 1}, **members}))

    return spoil


async def _no_name(client: Any, base: str, job: str) -> None:
    await client.hdel(f"{base}repeat:s", "name")


async def _no_hash(client: Any, base: str, job: str) -> None:
    await client.delete(f"{base}repeat:s")
    await client.set(f"{base}repeat:s", "x")


async def _no_number(client: Any, base: str, job: str) -> None:
    await client.hset(f"{base}repeat:s", "every", "-5")


async def _no_number_beside_a_pattern(client: Any, base: str, job: str) -> None:
    await _no_number(client, base, job)
    await options(repeat={"pattern": "* * * * *"})(client, base, job)


async def _deep(client: Any, base: str, job: str) -> None:
    await client.hset(f"{base}{job}", "opts", f'{{"repeat":{{"every":5}},"x":{"[" * 5_000}{"]" * 5_000}}}')


SPOILT: dict[str, Spoil] = {
    "a scheduler without a name": _no_name,
    "a scheduler that is no hash": _no_hash,
    "a period below zero": _no_number,
    "a period below zero beside a pattern": _no_number_beside_a_pattern,
    "no repeat": options(repeat=None),
    "a period and a pattern": options(repeat={"every": 5, "pattern": "* * * * *"}),
    "a limit in words": options(repeat={"every": 5, "limit": "three"}),
    "an end in words": options(repeat={"every": 5, "endDate": "tomorrow"}),
    "a time zone elsewhere": options(repeat={"pattern": "* * * * *", "tz": "Mars/Olympus"}),
    "an option of one version": options(repeat={"pattern": "* * * * *", "utc": True}),
    "a time beyond the calendar": options(repeat={"pattern": "* * * * *", "startDate": 2**53}),
    "a priority in words": options(priority="high"),
    "a deduplication that is a number": options(de=5),
    "no number": options(x=float("nan")),
    "a number beyond 64 bits": options(x=10**30),
    "a deep nest": _deep,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
async def test_a_schedule_that_cannot_go_on(
    storage: BullMQStorage, client: Any, job: str, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    """Its job does not run and is put off, nothing is changed, and it is told and logged once."""
    base = f"bull:{storage.queue}:"
    await spoil(client, base, job)
    before = await client.zscore(f"{base}repeat", "s")
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    with pytest.raises(StorageError, match="'s'"):
        await storage.claim("w", leases=LEASES, limit=5)
    await storage.promote([job])
    for _ in range(2):
        assert await storage.claim("w", leases=LEASES, limit=5) == []
    assert len(caplog.records) == 1
    # It is put off for some milliseconds, which may be over.
    there = {one.id for state in (JobState.SCHEDULED, JobState.QUEUED) for one in (await storage.list(state)).jobs}
    assert there == {job}
    assert await client.zscore(f"{base}repeat", "s") == before
    assert await client.hget(f"{base}{job}", "atm") is None


async def test_the_end_of_a_schedule_is_no_mistake(storage: BullMQStorage, client: Any, job: str) -> None:
    """The last job runs, and nothing follows."""
    await options(repeat={"every": HOUR_MS, "limit": 2, "count": 2})(client, f"bull:{storage.queue}:", job)
    [claim] = await storage.claim("w", leases=LEASES, limit=5)
    await storage.settle([Completed(claim=claim, result=b"null")])
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    assert await added(storage) == []


async def test_what_is_given_back_waits_for_others_twice_as_long_each_time(storage: BullMQStorage, client: Any) -> None:
    """An idle worker of Node takes it almost as soon as without us; ours do not spin on it."""
    base, raw = f"bull:{storage.queue}:", "repeat:0f3c:1700000000000"
    key, options = "rep::::* * * * * *", '{"repeat":{"pattern":"* * * * * *"},"prevMillis":1700000000000}'
    await client.zadd(f"{base}repeat", {key: 1_700_000_000_000})
    fields = {"name": "rep", "data": "{}", "opts": options, "timestamp": 1, "rjk": key}
    await client.hset(base + raw, mapping=fields)
    await client.lpush(f"{base}wait", raw)
    pauses: list[str] = []

    async def given_back() -> bool:
        with contextlib.suppress(StorageError):  # which tells of the schedule, once
            assert await storage.claim("w", leases=LEASES, limit=1) == []
        if (pause := await client.hget(base + raw, "delay")) not in pauses:
            pauses.append(pause)
        return len(pauses) == 3

    await until(given_back)
    assert pauses == ["20", "40", "80"]
