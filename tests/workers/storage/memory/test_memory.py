"""What is special about `MemoryStorage`: spaces, the manual clock, the lines its jobs stand in, and no leaks."""

from __future__ import annotations

import asyncio
import random
from datetime import datetime, timedelta

import pytest

from workers.clock import ManualClock, SystemClock
from workers.errors import StorageUnavailable, Unsupported
from workers.jobs import DROP, Completed, Continued, JobEvent, JobEventKind, JobState, Released, Retried
from workers.limits import Limit, LimitKey
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.memory.jobs import MOST_PARKED
from workers.storage.memory.line import Line
from workers.storage.subscribers import BUFFER, Subscribers
from workers.testing.faults import counting, faulty
from workers.testing.steps import ERROR, PATIENCE, job, next_claim

LEASES = {"*": timedelta(minutes=1)}


async def test_it_is_a_storage() -> None:
    """`MemoryStorage` satisfies the protocol, names its queue, and a fresh one is empty."""
    storage: Storage = MemoryStorage(queue="letters")
    assert storage.queue == "letters"
    assert repr(storage) == "MemoryStorage(queue='letters')"
    assert await storage.counts() == dict.fromkeys(JobState, 0)


async def test_storages_of_one_space_share_queues() -> None:
    """Two storages of a space see the same queue; storages without one share nothing."""
    space = MemorySpace()
    await MemoryStorage(space, "q").enqueue([job("shared")])
    assert (await MemoryStorage(space, "q").status(["shared"]))[0] is not None
    assert await MemoryStorage(space, "other").status(["shared"]) == [None]
    assert await MemoryStorage(queue="q").status(["shared"]) == [None]


async def test_wrong_arguments_are_refused() -> None:
    """A second clock, a transaction, an empty queue name and a clean of waiting jobs are refused with the reason."""
    with pytest.raises(ValueError, match="a space has its own clock"):
        MemoryStorage(MemorySpace(), clock=ManualClock())
    with pytest.raises(ValueError, match="queue name"):
        MemoryStorage(queue="")
    with pytest.raises(Unsupported, match="leave `connection` out"):
        await MemoryStorage().enqueue([job("a")], connection=object())
    with pytest.raises(ValueError, match="not queued ones"):
        await MemoryStorage().clean(JobState.QUEUED, older_than=timedelta(0))


async def test_a_sleeper_wakes_when_the_clock_is_moved() -> None:
    """With a manual clock a wait ends when an advance makes a job due, and not at an advance that does not."""
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    await storage.enqueue([job("later", delay=timedelta(hours=2))])
    waiting = asyncio.create_task(storage.wait(["*"], timeout=timedelta(hours=1)))
    for _ in range(2):
        await asyncio.sleep(0)
    clock.advance(timedelta(hours=1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(timedelta(hours=1))
    await asyncio.wait_for(waiting, PATIENCE)
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=1)] == ["later"]


async def test_delays_run_on_the_system_clock() -> None:
    """Without a clock of its own the storage's delays run out in real time and end a wait."""
    storage = MemoryStorage()
    await storage.enqueue([job("soon", delay=timedelta(milliseconds=300))])
    assert await storage.claim("w", leases=LEASES, limit=1) == []
    assert (await next_claim(storage)).job_id == "soon"


async def test_a_busy_worker_starves_nobody() -> None:
    """A wait that finds work at once still gives other tasks their turn."""
    storage = MemoryStorage()
    await storage.enqueue([job("there")])
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await storage.wait(["*"], timeout=timedelta(hours=1))
    assert turn.is_set()


async def test_an_idle_wait_looks_twice() -> None:
    """A wait with nothing to wake it looks when it begins and when it ends, not in between."""

    class CountingClock(SystemClock):
        looks = 0

        def now(self) -> datetime:
            self.looks += 1
            return super().now()

    clock = CountingClock()
    await MemoryStorage(clock=clock).wait(["*"], timeout=timedelta(milliseconds=100))
    assert clock.looks <= 4


async def test_parked_jobs_of_every_name_come_back() -> None:
    """Jobs of one ordering key and different names do not block each other's workers."""
    storage = MemoryStorage()
    names = ("a", "b", "c")
    await storage.enqueue([job("first", ordering_key="k", name="a")])
    await storage.enqueue([job(f"{name}-next", ordering_key="k", name=name) for name in names])
    (held,) = await storage.claim("w", leases=LEASES, limit=10)
    assert held.job_id == "first"
    await storage.cancel("a-next")
    only_c = {"c": timedelta(minutes=1)}
    assert await storage.claim("w", leases=only_c, limit=10) == []
    await storage.settle([Completed(claim=held, result=b"")])
    assert [claim.job_id for claim in await storage.claim("w", leases=only_c, limit=10)] == ["c-next"]


async def test_a_more_urgent_job_comes_ahead_of_the_front_of_its_fair_key() -> None:
    """It waits for no other turn of its key, and the job that it comes ahead of keeps its own."""
    storage = MemoryStorage()
    await storage.enqueue([job(f"{key}{at}", fair_key=key, priority=5) for key in "ab" for at in (1, 2)])
    (first,) = await storage.claim("w", leases=LEASES, limit=1)
    await storage.enqueue([job("c1", fair_key="c", priority=5), job("urgent", fair_key="a", priority=1)])
    rest = await storage.claim("w", leases=LEASES, limit=10)
    assert [one.job_id for one in (first, *rest)] == ["a1", "urgent", "b1", "a2", "c1", "b2"]


async def test_a_claim_parks_only_so_many_jobs() -> None:
    """Past many that a limit keeps back it brings none, and the next one goes on; no worker sleeps meanwhile."""
    storage = MemoryStorage()
    await storage.declare_limits({"api": Limit("1/d")})
    await storage.enqueue([job(f"a{at}", limit_key=LimitKey("api")) for at in range(2 * MOST_PARKED + 10)])
    await storage.enqueue([job("behind")])
    found = []
    for _ in range(3):
        async with asyncio.timeout(PATIENCE):
            await storage.wait(["*"], timeout=timedelta(days=1))
        found.append([one.job_id for one in await storage.claim("w", leases=LEASES, limit=10)])
    assert found == [["a0"], [], ["behind"]]


async def test_a_released_job_has_its_turn_still() -> None:
    """Jobs of fair keys that are all given back stand as they stood before."""
    storage = MemoryStorage()
    await storage.enqueue([job(job_id, fair_key=job_id[0]) for job_id in ("x1", "x2", "x3", "y1", "z1")])
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [one.job_id for one in claims] == ["x1", "y1", "z1", "x2", "x3"]
    await storage.settle([Released(claim=claim) for claim in reversed(claims)])
    again = await storage.claim("w", leases=LEASES, limit=10)
    assert [one.job_id for one in again] == ["x1", "y1", "z1", "x2", "x3"]


async def test_a_job_that_comes_later_has_its_turn_no_more() -> None:
    """A retry stands where it is due, and the next link of a chain behind all that wait."""
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    await storage.enqueue([job(f"x{at}", fair_key="x") for at in range(3)])
    _, retried, continued = await storage.claim("w", leases=LEASES, limit=10)
    await storage.settle([Retried(claim=retried, delay=timedelta(minutes=1), error=ERROR)])
    await storage.enqueue([job("before")])
    await storage.settle([Continued(claim=continued, then=job("x2", fair_key="x"))])
    clock.advance(timedelta(seconds=30))
    await storage.enqueue([job("between")])
    clock.advance(timedelta(minutes=1))
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [one.job_id for one in claims] == ["before", "x2", "between", "x1"]


async def test_a_turn_changes_neither_the_age_nor_the_page_of_a_job() -> None:
    """A job that comes forward has waited since it was enqueued, and is listed where it was."""
    clock = ManualClock()
    storage = MemoryStorage(clock=clock)
    await storage.enqueue([job(f"a{at}", fair_key="a") for at in range(4)])
    since = clock.now()
    clock.advance(timedelta(hours=1))
    await storage.enqueue([job("b0", fair_key="b")])
    page = await storage.list(JobState.QUEUED, limit=2)
    await storage.claim("w", leases=LEASES, limit=1)
    assert await storage.waiting_since() == since
    following = await storage.list(JobState.QUEUED, cursor=page.cursor, limit=10)
    assert [one.id for one in (*page.jobs, *following.jobs)] == ["a0", "a1", "a2", "a3", "b0"]


def test_a_line_keeps_order_through_leavers() -> None:
    """Whatever joins, moves and leaves at random, a line pops the rest in the order of their keys."""
    random_source = random.Random(7)
    line: Line[tuple[int]] = Line()
    standing: dict[str, tuple[int]] = {}
    for _ in range(5_000):
        member = f"m{random_source.randrange(300)}"
        if random_source.random() < 0.6:
            standing[member] = (random_source.randrange(1_000),)
            line.add(standing[member], member)
        else:
            standing.pop(member, None)
            line.discard(member)
        assert len(line) == len(standing)
    expected = sorted((key, member) for member, key in standing.items())
    assert line.head() == expected[0]
    assert [line.pop() for _ in range(len(line))] == expected
    assert line.head() is None
    with pytest.raises(IndexError):
        line.pop()


def test_a_line_forgets_leavers() -> None:
    """A line through which 100 000 pass and leave early stays small."""
    line: Line[tuple[int]] = Line()
    for number in range(100_000):
        line.add((number,), f"m{number}")
        line.discard(f"m{number}")
    assert len(line) == 0
    assert len(line._heap) < 200


async def test_names_keys_and_jobs_leave_no_trace() -> None:
    """Jobs with ever new ids, names and ordering keys that come and go leave nothing behind."""
    storage = MemoryStorage()
    for number in range(500):
        name = f"name-{number}"
        await storage.enqueue([job(f"a{number}", name=name, ordering_key=name), job(f"b{number}", ordering_key=name)])
        await storage.enqueue([job(f"c{number}", delay=timedelta(days=1))])
        claims = await storage.claim("w", leases=LEASES, limit=10)
        assert len(claims) == 1
        assert await storage.drain() == 2
        await storage.settle([Completed(claim=claim, result=b"", keep=DROP) for claim in claims])
    table = storage._queue.table
    assert set(await storage.counts()) == set(JobState)
    assert not any((await storage.counts()).values())
    assert (table._jobs, table._ready, table._parked, table._fronts, table.limits._running) == ({}, {}, {}, {}, {})
    assert len(table._delayed._heap) < 200


def test_a_slow_subscriber_loses_the_oldest() -> None:
    """A subscriber that does not read keeps the newest events, and nobody else notices."""

    async def listen() -> list[JobEvent]:
        subscribers = Subscribers()
        with subscribers.everything() as slow, subscribers.of_job("last") as other:
            for number in range(BUFFER + 10):
                subscribers.publish(JobEventKind.QUEUED, f"job-{number}")
            subscribers.publish(JobEventKind.QUEUED, "last")
            assert (await other.get()).job_id == "last"
            return [await slow.get() for _ in range(BUFFER)]

    events = asyncio.run(listen())
    assert events[0].job_id == "job-11"
    assert events[-1].job_id == "last"


def test_leaving_a_subscription_frees_it() -> None:
    """After the last subscriber of a job left, nothing of it remains."""

    async def come_and_go() -> Subscribers:
        subscribers = Subscribers()
        for number in range(10):
            with subscribers.of_job(f"job-{number}"), subscribers.of_job(f"job-{number}"):
                pass
        return subscribers

    assert asyncio.run(come_and_go())._of_job == {}


async def test_calls_can_be_counted() -> None:
    """A counting storage works like the one it wraps and knows how often each verb was called."""
    storage, calls = counting(MemoryStorage(queue="counted"))
    assert storage.queue == "counted"
    await storage.enqueue([job("a")])
    await storage.claim("w", leases=LEASES, limit=1)
    await storage.claim("w", leases=LEASES, limit=1)
    async with storage.events():
        assert calls == {"enqueue": 1, "claim": 2}


async def test_faults_lose_requests_and_replies() -> None:
    """A lost request has no effect, a lost reply has all of it; after that the storage works again."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["enqueue"] = 1
    with pytest.raises(StorageUnavailable, match="the request was lost"):
        await storage.enqueue([job("a")])
    assert await storage.status(["a"]) == [None]
    faults.replies_lost["enqueue"] = 1
    with pytest.raises(StorageUnavailable, match="the reply was lost"):
        await storage.enqueue([job("a")])
    assert await storage.status(["a"]) != [None]
    assert [result.status.value for result in await storage.enqueue([job("a")])] == ["duplicate"]
