"""A queue, the worker it runs where wanted, and the ids of what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.running import Recorder, done, forever, outcome
from workers import QueueOptions
from workers.jobs import Claim, EnqueueStatus, JobState
from workers.queue import JobSpec, Queue
from workers.serde import JsonSerde
from workers.specs import content_id
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import counting
from workers.testing.steps import PATIENCE, until
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import AttemptContext, Handler, Job, Next


class Reversed:
    """A serde of its own kind: text, backwards."""

    def dumps(self, value: object) -> bytes:
        return str(value)[::-1].encode()

    def loads(self, data: bytes) -> object:
        return data.decode()[::-1]


async def test_a_queue_runs_its_handler(storage: Storage) -> None:
    """After `execute`, `start` runs a worker: every name goes to the single handler, through the queue's serdes."""

    async def shout(job: Job) -> str:
        return f"{job.payload}!"

    queue = Queue(storage, options=QueueOptions(payload_serde=Reversed(), result_serde=Reversed(), worker_id="mine"))
    queue.execute(shout)
    async with queue:
        await queue.enqueue("hey", id="job", name="any name")
        assert (await outcome(storage, "job")).result == b"!yeh"
        assert (await queue.enqueue("hey", id="job")).result == "hey!"


async def test_a_queue_runs_handlers_by_name(storage: Storage) -> None:
    """A mapping of names goes to the worker as it is; middlewares and observers too."""
    recorder = Recorder()
    seen: list[str] = []

    async def note(context: AttemptContext, proceed: Next) -> object:
        seen.append(f"{context.worker_id} {context.job.name}")
        return await proceed()

    queue = Queue(storage, options=QueueOptions(worker_id="mine", middlewares=[note], observers=[recorder]))
    queue.execute({"mail": done, "sms": Handler(lambda job: "sent")})
    async with queue:
        await queue.enqueue_many([JobSpec(payload=1, id="1", name="mail"), JobSpec(payload=2, id="2", name="sms")])
        assert (await outcome(storage, "1")).result == b"null"
        assert (await outcome(storage, "2")).result == b'"sent"'
    assert sorted(seen) == ["mine mail", "mine sms"]
    assert recorder.story()[-1] is Kind.STOPPED


async def test_a_queue_without_handlers_runs_nothing(storage: Storage) -> None:
    """A producer only enqueues."""
    async with Queue(storage) as queue:
        await queue.enqueue(1, id="job")
        await asyncio.sleep(0.02)
        assert await steps.state(storage, "job") is JobState.QUEUED


async def test_start_and_stop_can_be_repeated() -> None:
    """A second start runs no second worker, a second stop does nothing; a stopped queue starts anew."""
    storage, calls = counting(MemoryStorage())
    recorder = Recorder()
    queue = Queue(storage, options=QueueOptions(observers=[recorder]))
    queue.execute(done)
    for _ in range(2):
        await queue.start()
        await queue.start()
        job = await queue.enqueue(1)
        await outcome(storage, job.id)
        await queue.stop()
        await queue.stop()
    assert recorder.story().count(Kind.READY) == 2
    assert calls["connect"] == calls["disconnect"] == 4, "once for the queue, once for its worker, twice over"


async def test_execute_comes_before_start() -> None:
    """Handlers cannot be changed under a running worker."""
    queue = Queue(MemoryStorage())
    queue.execute(done)
    async with queue:
        with pytest.raises(RuntimeError, match="before start"):
            queue.execute(done)


async def test_stop_lets_jobs_finish_for_the_grace(storage: Storage) -> None:
    """Leaving the block stops the worker in its phases: what hangs is given back, uncounted."""
    recorder = Recorder()
    queue = Queue(storage, options=QueueOptions(grace=timedelta(0), observers=[recorder]))
    queue.execute(forever)
    async with asyncio.timeout(PATIENCE):
        async with queue:
            await queue.enqueue(1, id="job")
            await recorder.seen(Kind.ACTIVE)
    assert await steps.state(storage, "job") is JobState.QUEUED


async def test_stop_tells_what_ended_the_worker() -> None:
    """A worker that failed is not forgotten: `stop` raises its error, and still disconnects."""

    class Breaks(MemoryStorage):
        async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
            raise LookupError("a bug")

    storage, calls = counting(Breaks())
    recorder = Recorder()
    queue = Queue(storage, options=QueueOptions(observers=[recorder]))
    queue.execute(done)
    await queue.start()
    await recorder.seen(Kind.STOPPED)
    with pytest.raises(LookupError, match="a bug"):
        await queue.stop()
    await queue.stop()
    assert calls["connect"] == calls["disconnect"]


async def test_queues_on_one_storage_are_apart(tmp_path: Path) -> None:
    """The same id in two queues is two jobs; stopping one queue disturbs nothing of the other."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    await SqlStorage(url).migrate()
    space = MemorySpace()
    for make in (lambda name: SqlStorage(url, name), lambda name: MemoryStorage(space, name)):
        mail, sms = Queue(make("mail")), Queue(make("sms"))
        mail.execute(lambda job: f"mail {job.payload}")
        sms.execute(lambda job: f"sms {job.payload}")
        async with sms:
            async with mail:
                await mail.enqueue(1, id="job")
                await outcome(mail.storage, "job")
            assert (await sms.enqueue(2, id="job")).status is EnqueueStatus.QUEUED
            assert (await outcome(sms.storage, "job")).result == b'"sms 2"'


async def test_concurrency_is_the_workers() -> None:
    """A queue's worker runs as many jobs at once as the queue says."""
    recorder = Recorder()
    queue = Queue(MemoryStorage(), concurrency=3, options=QueueOptions(grace=timedelta(0), observers=[recorder]))
    queue.execute(forever)
    async with queue:
        await queue.enqueue_many([JobSpec(payload=number) for number in range(5)])
        await recorder.seen(Kind.ACTIVE, 3)
        await until(lambda: len(recorder.of(Kind.ACTIVE)) >= 3)
        assert (await queue.storage.counts())[JobState.QUEUED] == 2


def test_content_ids_tell_payloads_apart() -> None:
    """Equal payloads have equal ids, whatever the order of their keys; different ones do not."""
    assert content_id({"a": 1, "b": [2]}) == content_id({"b": [2], "a": 1})
    assert content_id({"a": 1}) != content_id({"a": "1"})
    assert content_id([1, 2]) != content_id([2, 1])
    assert len(content_id(None)) == 64


def test_content_ids_take_a_serde() -> None:
    """With a serde the id is that of its bytes."""
    assert content_id("ab", serde=Reversed()) == content_id("ba", serde=_Plain())
    assert content_id({"a": 1}) == content_id({"a": 1}, serde=JsonSerde())


class _Plain:
    def dumps(self, value: object) -> bytes:
        return str(value).encode()

    def loads(self, data: bytes) -> object:
        return data.decode()
