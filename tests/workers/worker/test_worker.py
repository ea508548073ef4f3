"""The worker's loop: how it claims, waits, wakes, and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import pytest

from tests.workers.running import AT_ONCE, LEASE, Crowd, Recorder, broken, done, forever, outcome, running
from workers import WorkerOptions
from workers.jobs import Claim, ErrorInfo, JobState, OutcomeKind, Settlement, SettleOutcome
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, HandlerFunction, Job

WINDOW = 0.3
"""Seconds of looking at a worker that should do nothing."""


class Watched(MemoryStorage):
    """Remembers what claims were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[dict[str, timedelta], int]] = []

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        self.asked.append((dict(leases), limit))
        return await super().claim(worker_id, leases=leases, limit=limit)

    async def asked_again(self, times: int) -> None:
        """That many more claims came."""
        goal = len(self.asked) + times
        await until(lambda: len(self.asked) >= goal)


async def test_one_claim_fills_every_free_slot() -> None:
    """With four slots the first claim asks for four jobs and gets them, and never do more than four run at once."""
    storage, crowd, recorder = Watched(), Crowd(), Recorder()
    await steps.enqueue(storage, *(steps.job() for _ in range(11)))
    async with running(Worker(storage, {"work": crowd}, concurrency=4, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE, 4)
        assert [limit for _, limit in storage.asked] == [4]
        crowd.open.set()
        await recorder.seen(Kind.COMPLETED, 11)
    assert crowd.peak == 4
    assert len(set(crowd.runs)) == len(crowd.runs) == 11


class SlowToSettle(MemoryStorage):
    """Stores the end of no attempt before it is `let`."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        await self.let.wait()
        return await super().settle(settlements)


@pytest.mark.parametrize(("concurrency", "begun"), [(1, 1), (2, 4), (5, 10)])
async def test_the_next_jobs_run_while_the_ends_of_the_last_are_stored(concurrency: int, begun: int) -> None:
    """As many as there are slots; so many ends may wait to be stored. With one slot, each waits for the one before."""
    storage, recorder, ran = SlowToSettle(), Recorder(), []

    async def work(job: Job) -> None:
        ran.append(job.id)

    await steps.enqueue(storage, *(steps.job() for _ in range(12)))
    worker = Worker(storage, {"work": work}, concurrency=concurrency, observers=[recorder])
    async with running(worker):
        await until(lambda: len(ran) == begun)
        await asyncio.sleep(WINDOW)
        assert (len(ran), worker.running) == (begun, begun)
        storage.let.set()
        await recorder.seen(Kind.COMPLETED, 12)
    assert len(set(ran)) == 12


async def test_a_full_worker_asks_the_storage_nothing(storage: Storage) -> None:
    """While every slot is taken no claim and no wait reaches the storage, however many jobs come in."""
    watched, calls = counting(storage)
    crowd, recorder = Crowd(), Recorder()
    await steps.enqueue(storage, *(steps.job() for _ in range(3)))
    async with running(Worker(watched, {"work": crowd}, concurrency=2, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE, 2)
        before = calls["claim"], calls["wait"]
        await steps.enqueue(storage, *(steps.job() for _ in range(50)))
        await asyncio.sleep(WINDOW)
        assert (calls["claim"], calls["wait"]) == before == (1, 0)
        crowd.open.set()
        await recorder.seen(Kind.COMPLETED, 53)


async def test_an_idle_worker_asks_once(storage: Storage) -> None:
    """An empty queue is claimed from once; then the worker waits, whatever time passes."""
    watched, calls = counting(storage)
    async with running(Worker(watched, {"work": forever})):
        await until(lambda: calls["wait"] == 1)
        await asyncio.sleep(WINDOW)
        assert calls["claim"] == calls["wait"] == 1
        assert calls["renew"] == calls["settle"] == 0, "there is nothing to renew and nothing to settle"


async def test_an_idle_worker_wakes_for_a_new_job(storage: Storage) -> None:
    """A job enqueued while the worker waits is run long before the poll interval ends."""
    watched, calls = counting(storage)
    async with running(Worker(watched, {"work": done})):
        await until(lambda: calls["wait"] == 1)
        await steps.enqueue(storage, steps.job("late"))
        assert (await outcome(storage, "late")).kind is OutcomeKind.COMPLETED


async def test_an_idle_worker_wakes_for_a_delayed_job(storage: Storage) -> None:
    """A job that becomes due while the worker waits is run then, not at the next poll."""
    watched, calls = counting(storage)
    await steps.enqueue(storage, steps.job("due", delay=timedelta(milliseconds=150)))
    async with running(Worker(watched, {"work": done})):
        assert (await outcome(storage, "due")).kind is OutcomeKind.COMPLETED
    assert calls["claim"] <= 4


async def test_workers_share_a_queue(storage: Storage) -> None:
    """Three workers on one queue run each of 60 jobs exactly once."""
    runs: list[str] = []

    async def remember(job: Job) -> None:
        runs.append(job.id)
        await asyncio.sleep(0)

    recorder = Recorder()
    jobs = [steps.job() for _ in range(60)]
    workers = [Worker(storage, {"work": remember}, concurrency=5, observers=[recorder]) for _ in range(3)]
    async with running(*workers):
        await steps.enqueue(storage, *jobs)
        await recorder.seen(Kind.COMPLETED, 60)
    assert sorted(runs) == sorted(job.id for job in jobs)


async def test_names_find_their_handlers() -> None:
    """A job runs in the handler of its name, any other in the catch-all."""
    storage = MemoryStorage()

    async def mail(job: Job) -> str:
        return f"mail {job.name}"

    async def other(job: Job) -> str:
        return f"other {job.name}"

    await steps.enqueue(storage, steps.job("1", name="mail"), steps.job("2", name="sms"))
    async with running(Worker(storage, {"mail": mail, "*": other})):
        assert (await outcome(storage, "1")).result == b'"mail mail"'
        assert (await outcome(storage, "2")).result == b'"other sms"'


async def test_names_nobody_handles_are_left_alone() -> None:
    """A worker claims only what it has handlers for; other jobs wait for their own worker."""
    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("theirs", name="sms"), steps.job("ours", name="mail"))
    async with running(Worker(storage, {"mail": done})):
        await outcome(storage, "ours")
        assert await steps.state(storage, "theirs") is JobState.QUEUED


async def test_where_names_cannot_be_filtered_an_unknown_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a storage without a name filter the worker takes every job, and fails the ones it does not know for good."""

    storage = MemoryStorage()
    monkeypatch.setattr(MemoryStorage, "capabilities", dataclasses.replace(storage.capabilities, name_filter=False))
    await steps.enqueue(storage, steps.job("theirs", name="sms"))
    async with running(Worker(storage, {"mail": done})):
        ended = await outcome(storage, "theirs")
    assert ended.error is not None
    assert ended.error.type == "UnknownJobError"
    assert "'sms'" in ended.error.message
    assert "['mail']" in ended.error.message


async def test_a_job_that_stalled_too_often_is_failed_unrun() -> None:
    """A claim that tells of stalls settles as failed with the storage's message; no handler sees it."""

    class TellsAtTheClaim(MemoryStorage):
        async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
            claims = await super().claim(worker_id, leases=leases, limit=limit)
            stalled = ErrorInfo(type="StalledError", message="lost four times")
            return [dataclasses.replace(claim, stalled=stalled) for claim in claims]

    storage, crowd, recorder = TellsAtTheClaim(), Crowd(), Recorder()
    await steps.enqueue(storage, steps.job("poison"))
    async with running(Worker(storage, {"work": crowd}, observers=[recorder])):
        ended = await outcome(storage, "poison")
        await recorder.seen(Kind.FAILED)
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("StalledError", "lost four times")
    assert crowd.runs == []
    assert Kind.ACTIVE not in recorder.story()


async def test_each_name_has_its_lease() -> None:
    """Claims ask with the handler's own lease where it has one, else with the worker's."""
    storage = Watched()
    quick, default = timedelta(seconds=5), timedelta(seconds=40)
    handlers: dict[str, Handler | HandlerFunction] = {"quick": Handler(done, lease=quick), "plain": done}
    recorder = Recorder()
    async with running(Worker(storage, handlers, lease=default, observers=[recorder])):
        await recorder.seen(Kind.READY)
        await until(lambda: bool(storage.asked))
    assert storage.asked[0][0] == {"quick": quick, "plain": default}


async def test_events_tell_the_story_in_order() -> None:
    """Ready, then each attempt's start and end with its values, drained when nothing is left, and stopped at last."""
    storage, recorder = MemoryStorage(queue="mail"), Recorder()

    async def second_time_lucky(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("not yet")

    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(
        storage, {"work": second_time_lucky}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE, worker_id="w1")
    )
    started = time.monotonic()
    async with running(worker):
        await recorder.seen(Kind.DRAINED)
    assert recorder.story() == [
        *(Kind.READY, Kind.ACTIVE, Kind.FAILING),
        *(Kind.ACTIVE, Kind.COMPLETED, Kind.DRAINED, Kind.STOPPING, Kind.STOPPED),
    ]
    failing, completed = recorder.of(Kind.FAILING)[0], recorder.of(Kind.COMPLETED)[0]
    assert {(event.queue, event.worker_id) for event in recorder.events} == {("mail", "w1")}
    assert isinstance(failing.error, ValueError)
    assert failing.delay == timedelta(0)
    assert failing.claim is not None
    assert completed.claim is not None
    assert (failing.claim.attempt, completed.claim.attempt) == (1, 2)
    assert completed.duration is not None
    assert timedelta(0) <= completed.duration <= timedelta(seconds=time.monotonic() - started)


async def test_drained_is_told_when_the_last_job_has_ended() -> None:
    """Each time the queue runs empty and its last job has ended, drained is told once; never while a job runs."""
    storage, crowd, recorder = Watched(), Crowd(), Recorder()
    often = timedelta(milliseconds=5)
    async with running(
        Worker(
            storage, {"work": crowd}, concurrency=3, observers=[recorder], options=WorkerOptions(poll_interval=often)
        )
    ):
        for round_number in (1, 2):
            await steps.enqueue(storage, steps.job(), steps.job())
            await recorder.seen(Kind.ACTIVE, 2 * round_number)
            assert len(recorder.of(Kind.DRAINED)) == round_number - 1
            crowd.open.set()
            await recorder.seen(Kind.DRAINED, round_number)
            crowd.open.clear()
            await storage.asked_again(times=3)
    assert len(recorder.of(Kind.DRAINED)) == 2


async def test_running_tells_how_many_jobs_are_held() -> None:
    """`running` counts the jobs claimed and not settled."""
    storage, crowd, recorder = MemoryStorage(), Crowd(), Recorder()
    await steps.enqueue(storage, steps.job(), steps.job())
    worker = Worker(storage, {"work": crowd}, observers=[recorder])
    async with running(worker):
        await recorder.seen(Kind.ACTIVE, 2)
        assert worker.running == 2
        crowd.open.set()
        await recorder.seen(Kind.DRAINED)
        assert worker.running == 0


async def test_a_job_stays_held_until_its_settlement_is_answered() -> None:
    """A handler that has ended keeps its slot and its lease while the storage does not take the settlement."""
    storage, faults = faulty(MemoryStorage())
    watched, calls = counting(storage)
    recorder = Recorder()
    broken(faults, "settle")
    await steps.enqueue(storage, steps.job("ended"), steps.job("waiting"))
    worker = Worker(watched, {"work": done}, concurrency=1, lease=LEASE, observers=[recorder])
    async with running(worker):
        await until(lambda: calls["renew"] >= 4)
        assert worker.running == 1
        assert await steps.state(storage, "waiting") is JobState.QUEUED
        broken(faults, "settle", down=False)
        await recorder.seen(Kind.COMPLETED, 2)
    assert (await steps.status(storage, "ended")).attempt == 1


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"overtime": -1}, {"lease": timedelta(0)}, {"worker_id": "x" * 513}],
    ids=["no slot", "less than no overtime", "no lease", "a worker id of 513 bytes"],
)
def test_a_worker_that_could_not_work_is_refused(options: dict[str, object]) -> None:
    """Settings out of their range are a `ValueError` when the worker is made, or its options."""
    make: Callable[..., Worker] = partial(Worker, MemoryStorage(), {"work": done})
    rare: Callable[..., WorkerOptions] = WorkerOptions
    with pytest.raises(ValueError, match=r"concurrency|overtime|lease|worker id"):
        make(**options) if options.keys() <= {"concurrency", "lease"} else rare(**options)


def test_a_worker_without_handlers_is_refused() -> None:
    """No handlers are a `ValueError`, not a worker that idles for ever."""
    with pytest.raises(ValueError, match="at least one handler"):
        Worker(MemoryStorage(), {})
