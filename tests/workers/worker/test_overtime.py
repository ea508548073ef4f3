"""Attempts that leave their slot: others run in their place, and nothing else is different."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest

from tests.workers.running import AT_ONCE, LEASE, Recorder, done, outcome, running
from tests.workers.worker.stopping import HOUR, NO_GRACE, Gate, SlowClaims, assert_released, run_to_the_end
from workers import QueueOptions, WorkerOptions
from workers.errors import UnrecoverableError
from workers.jobs import Claim, JobState, OutcomeKind
from workers.queue import Queue
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import HandlerFunction, Job, SignalReason


class Leaver:
    """A handler that leaves its slot at once, keeps what it was told, and waits for `open`."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.signals: list[SignalReason | None] = []
        self.open = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        self.told.append(job.leave_slot())
        try:
            await self.open.wait()
        finally:
            self.signals.append(job.signal.reason)


class Limits(MemoryStorage):
    """Remembers how many jobs each claim asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        self.asked.append(limit)
        return await super().claim(worker_id, leases=leases, limit=limit)


def leavers(count: int) -> list[str]:
    return [f"leaver-{number}" for number in range(count)]


async def test_another_job_runs_in_the_place_of_one_in_overtime() -> None:
    """A worker with one slot ends a second job while the first goes on, which then ends as any other."""
    storage, leaver, recorder = MemoryStorage(), Leaver(), Recorder()
    await steps.enqueue(storage, steps.job("long", name="long"), steps.job("short"))
    worker = Worker(
        storage, {"long": leaver, "work": done}, concurrency=1, observers=[recorder], options=WorkerOptions(overtime=1)
    )
    async with running(worker):
        assert (await outcome(storage, "short")).kind is OutcomeKind.COMPLETED
        await recorder.seen(Kind.COMPLETED)
        assert leaver.told == [True]
        assert worker.running == 1
        assert await steps.state(storage, "long") is JobState.PROCESSING
        leaver.open.set()
        assert (await outcome(storage, "long")).kind is OutcomeKind.COMPLETED
        await recorder.seen(Kind.DRAINED)
        assert worker.running == 0
    assert recorder.story("long") == [Kind.ACTIVE, Kind.COMPLETED]


async def test_a_queues_own_worker_has_overtime_too() -> None:
    """`QueueOptions(overtime=...)` is its worker's."""
    leaver = Leaver()
    queue = Queue(MemoryStorage(), concurrency=1, options=QueueOptions(overtime=1))
    queue.execute({"long": leaver, "*": lambda job: job.payload})
    async with queue:
        await queue.enqueue(None, name="long", id="long")
        async with asyncio.timeout(PATIENCE):
            assert await queue.enqueue_and_wait("short") == "short"
        leaver.open.set()


async def test_there_is_room_for_as_many_as_the_worker_allows() -> None:
    """Whoever finds no room is told so and keeps its slot, so that nobody runs in its place."""
    storage, leaver, recorder = Limits(), Leaver(), Recorder()
    await steps.enqueue(storage, *map(steps.job, leavers(3)), steps.job("waiting"))
    worker = Worker(storage, {"work": leaver}, concurrency=1, observers=[recorder], options=WorkerOptions(overtime=2))
    async with running(worker):
        await until(lambda: len(leaver.told) == 3)
        assert leaver.told == [True, True, False]
        assert worker.running == 3
        leaver.open.set()
        await recorder.seen(Kind.COMPLETED, 4)
    assert leaver.told == [True, True, False, True], "those that ended made room"
    assert set(storage.asked) == {1}


async def test_nobody_is_in_overtime_unless_it_is_allowed() -> None:
    """A worker as made without `overtime` lets nobody leave."""
    storage, leaver = MemoryStorage(), Leaver()
    leaver.open.set()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": leaver})):
        await outcome(storage, "job")
    assert leaver.told == [False]


def test_without_a_worker_there_is_no_slot_to_leave() -> None:
    """A handler that is tested by itself may ask, and is told that nothing happened."""
    job = Job(id="1", name="work", payload=None, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    assert job.leave_slot() is False


async def test_who_leaves_twice_leaves_one_slot() -> None:
    """The second time it is told that it is out, and neither another slot nor more of the room is gone."""
    told: list[bool] = []
    again = asyncio.Event()

    async def leave_twice(job: Job) -> None:
        told.append(job.leave_slot())
        await again.wait()
        told.append(job.leave_slot())
        await asyncio.Event().wait()

    storage, leaver = Limits(), Leaver()
    await steps.enqueue(storage, steps.job("twice", name="twice"), *map(steps.job, leavers(2)))
    worker = Worker(storage, {"twice": leave_twice, "work": leaver}, concurrency=1, options=WorkerOptions(overtime=2))
    async with running(worker):
        await until(lambda: len(leaver.told) == 2)
        again.set()
        await until(lambda: len(told) == 2)
        assert (told, leaver.told) == ([True, True], [True, False])
        leaver.open.set()
        await steps.enqueue(storage, *(steps.job() for _ in range(3)))
        await until(lambda: len(leaver.told) == 5)
        assert set(storage.asked) == {1}


async def test_slots_that_are_left_together_are_filled_together() -> None:
    """Eight attempts that leave at once make one claim for eight jobs, not eight for one."""
    storage, leave, recorder = Limits(), asyncio.Event(), Recorder()
    told: list[bool] = []

    async def leave_later(job: Job) -> None:
        await leave.wait()
        told.append(job.leave_slot())
        await asyncio.Event().wait()

    await steps.enqueue(storage, *map(steps.job, leavers(16)))
    async with running(
        Worker(storage, {"work": leave_later}, concurrency=8, observers=[recorder], options=WorkerOptions(overtime=8))
    ):
        await recorder.seen(Kind.ACTIVE, 8)
        leave.set()
        await recorder.seen(Kind.ACTIVE, 16)
        await until(lambda: len(told) == 16)
        assert told == 8 * [True] + 8 * [False]
    assert storage.asked == [8, 8]


async def _let_go(storage: Storage, leaver: Leaver) -> None:
    leaver.open.set()


async def _cancel(storage: Storage, leaver: Leaver) -> None:
    await storage.cancel("first")


async def _remove(storage: Storage, leaver: Leaver) -> None:
    assert await storage.remove(["first"], running=True) == 1


async def _fail(job: Job) -> None:
    raise UnrecoverableError("no")


async def _try_again(job: Job) -> None:
    if job.attempt == 1:
        raise ValueError("not yet")


Way = tuple[Callable[[Storage, Leaver], Awaitable[None]], HandlerFunction, Kind]

WAYS: dict[str, Way] = {
    "completed": (_let_go, done, Kind.COMPLETED),
    "failed": (_let_go, _fail, Kind.FAILED),
    "failing": (_let_go, _try_again, Kind.FAILING),
    "cancelled": (_cancel, done, Kind.CANCELLED),
    "lease lost": (_remove, done, Kind.LEASE_LOST),
}
"""What brings the attempt's end about, how its handler ends if let go, and what is told of it."""


@pytest.mark.parametrize("way", WAYS)
async def test_however_it_ends_no_slot_is_lost_or_won(way: str) -> None:
    """After an attempt in overtime has ended there are as many slots as before, and its room is free again."""
    bring_about, rest, kind = WAYS[way]
    storage, leaver, full, recorder = Limits(), Leaver(), Leaver(), Recorder()

    async def leave(job: Job) -> object:
        await leaver(job)
        ending = rest(job)
        assert isinstance(ending, Awaitable)
        return await ending

    handlers: dict[str, HandlerFunction] = {"leave": leave, "work": full}
    worker = Worker(
        storage, handlers, concurrency=2, observers=[recorder], options=WorkerOptions(overtime=1, retry=AT_ONCE)
    )
    await steps.enqueue(storage, steps.job("first", name="leave"))
    async with running(worker):
        await until(lambda: leaver.told == [True])
        await bring_about(storage, leaver)
        await recorder.seen(kind)
        await recorder.seen(Kind.DRAINED)
        storage.asked.clear()
        await steps.enqueue(storage, *map(steps.job, leavers(5)))
        await until(lambda: len(full.told) == 3)
        assert sorted(full.told) == [False, False, True], "two are in slots and one is in overtime"
        assert worker.running == 3
        assert (storage.asked[0], max(storage.asked)) == (2, 2)
    assert leaver.signals[0] == {"cancelled": SignalReason.CANCELLED, "lease lost": SignalReason.LEASE_LOST}.get(way)


async def test_the_lease_of_one_in_overtime_is_kept() -> None:
    """An attempt that outlives its lease in overtime is neither recovered nor run twice."""
    storage, calls = counting(MemoryStorage())
    leaver = Leaver()
    await steps.enqueue(storage, steps.job("long"))
    async with running(Worker(storage, {"work": leaver}, lease=LEASE, options=WorkerOptions(overtime=1))):
        await until(lambda: leaver.told == [True])
        await until(lambda: calls["renew"] >= 4)
        assert not (await storage.recover(10)).requeued
        leaver.open.set()
        await outcome(storage, "long")
    assert (await steps.status(storage, "long")).attempt == 1


async def test_the_grace_waits_for_those_in_overtime() -> None:
    """A stopping worker keeps their leases, lets them finish, and claims nothing for the slots they left."""
    storage, calls = counting(MemoryStorage())
    leaver = Leaver()
    await steps.enqueue(storage, steps.job("long"))
    worker = Worker(
        storage, {"work": leaver}, concurrency=1, lease=LEASE, options=WorkerOptions(overtime=1, grace=HOUR)
    )
    async with run_to_the_end(worker) as task:
        await until(lambda: leaver.told == [True])
        await until(lambda: calls["wait"])  # for a job for the slot that was left: no claim is on its way
        worker.stop()
        await steps.enqueue(storage, steps.job("too late"))
        renewed = calls["renew"]
        await until(lambda: calls["renew"] >= renewed + 2)
        assert worker.running == 1
        leaver.open.set()
    await task
    assert await steps.state(storage, "long") is JobState.COMPLETED
    assert await steps.state(storage, "too late") is JobState.QUEUED


async def _stop(worker: Worker, task: asyncio.Task[None]) -> None:
    worker.stop()


async def _stop_twice(worker: Worker, task: asyncio.Task[None]) -> None:
    worker.stop()
    worker.stop()


async def _cancel_the_worker(worker: Worker, task: asyncio.Task[None]) -> None:
    task.cancel()


@pytest.mark.parametrize(
    ("end", "grace"),
    [(_stop, NO_GRACE), (_stop_twice, HOUR), (_cancel_the_worker, HOUR)],
    ids=["the grace is over", "without grace", "cancelled"],
)
@pytest.mark.parametrize("full", [False, True], ids=["waiting for jobs", "waiting for a slot"])
async def test_a_stop_gives_back_those_in_overtime(
    full: bool, end: Callable[[Worker, asyncio.Task[None]], Awaitable[None]], grace: timedelta
) -> None:
    """What has not ended by then is told of the shutdown, and claimable at once and uncounted."""
    storage, leaver = MemoryStorage(), Leaver()
    names = leavers(2 if full else 1)
    await steps.enqueue(storage, *map(steps.job, names))
    worker = Worker(storage, {"work": leaver}, concurrency=1, options=WorkerOptions(overtime=1, grace=grace))
    async with run_to_the_end(worker) as task:
        await until(lambda: len(leaver.told) == len(names))
        await end(worker, task)
    assert task.cancelled() is (end is _cancel_the_worker)
    assert leaver.told == [True, False][: len(names)]
    assert leaver.signals == len(names) * [SignalReason.SHUTDOWN]
    assert worker.running == 0
    for name in names:
        await assert_released(storage, name)


async def test_a_stop_amid_a_claim_for_a_slot_that_was_left() -> None:
    """The job that such a claim brings is run as any other, beside the one in overtime."""
    storage, leaver = SlowClaims(), Leaver()
    storage.answer.set()
    await steps.enqueue(storage, steps.job("long"))
    worker = Worker(storage, {"work": leaver}, concurrency=1, options=WorkerOptions(overtime=1, grace=HOUR))
    async with run_to_the_end(worker) as task:
        await until(lambda: leaver.told == [True])
        storage.asked.clear()
        storage.answer.clear()
        await steps.enqueue(storage, steps.job("late"))
        await storage.asked.wait()
        worker.stop()
        storage.answer.set()
        await until(lambda: leaver.told == [True, False])
        leaver.open.set()
    await task
    assert [await steps.state(storage, name) for name in ("long", "late")] == 2 * [JobState.COMPLETED]


async def test_threads_leave_their_slots() -> None:
    """Of twenty plain functions that leave at the same moment seven find room, and seven jobs run in their place."""
    together, go_on = threading.Event(), threading.Event()
    told: list[bool] = []
    gate = Gate()
    asyncio.get_running_loop().set_debug(True)  # what a thread must not do to the loop has no effect then

    def leave(job: Job) -> bool:
        together.wait(PATIENCE)
        told.append(job.leave_slot())
        return go_on.wait(PATIENCE)

    storage, recorder = Limits(), Recorder()
    await steps.enqueue(storage, *(steps.job(name="leave") for _ in range(20)), *(steps.job() for _ in range(9)))
    worker = Worker(
        storage, {"leave": leave, "work": gate}, concurrency=20, observers=[recorder], options=WorkerOptions(overtime=7)
    )
    async with running(worker):
        await recorder.seen(Kind.ACTIVE, 20)
        together.set()  # and the loop is asleep by the time they leave
        await recorder.seen(Kind.ACTIVE, 27)
        await until(lambda: len(told) == 20)
        assert (sum(told), worker.running, sum(storage.asked)) == (7, 27, 27)
        go_on.set()
        gate.open.set()
        await recorder.seen(Kind.COMPLETED, 29)
        await recorder.seen(Kind.DRAINED)
    assert max(storage.asked) == 20


async def test_a_thread_that_outlived_its_attempt_leaves_nothing() -> None:
    """A plain function that goes on after its worker gave it up is refused; no slot is won by it."""
    begun, given_up, told_so = threading.Event(), threading.Event(), threading.Event()
    told: list[bool] = []

    def late(job: Job) -> None:
        begun.set()
        given_up.wait(PATIENCE)
        told.append(job.leave_slot())
        told_so.set()

    limits = Limits()
    await steps.enqueue(limits, steps.job("late", name="late"))
    worker = Worker(limits, {"late": late}, concurrency=1, options=WorkerOptions(overtime=1, grace=timedelta(0)))
    task = asyncio.create_task(worker.run())
    await until(begun.is_set)
    worker.stop()
    await task
    given_up.set()
    await until(told_so.is_set)
    assert told == [False]
    assert (limits.asked, worker.running) == ([1], 0)
