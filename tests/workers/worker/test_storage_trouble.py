"""What a worker makes of a storage that loses calls, refuses them, or is not fit for use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.running import Crowd, Recorder, done, forever, outcome, running
from workers import WorkerOptions
from workers.errors import StorageError
from workers.jobs import Claim, JobState, OutcomeKind, Recovery, Renewal
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import faulty
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job


async def test_a_claim_that_fails_is_tried_again() -> None:
    """A storage that loses claims is reported as an error and asked again; no job suffers."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["claim"] = 2
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": done}, observers=[recorder])):
        await outcome(storage, "job")
    assert recorder.story()[:3] == [Kind.READY, Kind.ERROR, Kind.ERROR]
    assert (await steps.status(storage, "job")).attempt == 1


async def test_claims_whose_reply_was_lost_are_recovered() -> None:
    """Jobs claimed by a call whose answer never came are run once their lease has ended."""
    storage, faults = faulty(MemoryStorage())
    faults.replies_lost["claim"] = 1
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": done}, lease=timedelta(milliseconds=200))):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert (await steps.status(storage, "job")).attempt == 2


async def test_a_storage_not_fit_for_use_ends_the_worker(tmp_path: Path) -> None:
    """Missing tables end `run` with the storage's own error."""
    storage = SqlStorage(f"sqlite:///{tmp_path}/empty.db")
    recorder = Recorder()
    with pytest.raises(StorageError):
        await Worker(storage, {"work": done}, observers=[recorder]).run()
    assert recorder.story() == [Kind.STOPPED]


async def test_a_claim_that_is_refused_is_tried_again() -> None:
    """Claims that answer with `StorageError` are reported; what runs goes on, and so does the worker afterwards."""

    class Breaks(MemoryStorage):
        broken = False

        async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
            if self.broken:
                raise StorageError("a key of the wrong type")
            return await super().claim(worker_id, leases=leases, limit=limit)

    storage, crowd, recorder = Breaks(), Crowd(), Recorder()
    await steps.enqueue(storage, steps.job("running"))
    async with running(Worker(storage, {"work": crowd}, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        storage.broken = True
        await steps.enqueue(storage, steps.job("next"))
        assert isinstance((await recorder.seen(Kind.ERROR, 2)).error, StorageError)
        crowd.open.set()
        assert (await outcome(storage, "running")).kind is OutcomeKind.COMPLETED
        storage.broken = False
        assert (await outcome(storage, "next")).kind is OutcomeKind.COMPLETED


@pytest.mark.parametrize("verb", ["recover", "sweep", "renew"])
async def test_what_the_storage_refuses_beside_claims_is_tried_again(verb: str) -> None:
    """A pass or a renewal that answers with `StorageError` is reported; the worker goes on and asks again."""

    class Breaks(MemoryStorage):
        async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
            refuse("recover")
            return await super().recover(limit, max_stalls=max_stalls)

        async def sweep(self, limit: int) -> int:
            refuse("sweep")
            return await super().sweep(limit)

        async def renew(self, claims: Sequence[Claim]) -> Renewal:
            refuse("renew")
            return await super().renew(claims)

    def refuse(called: str) -> None:
        if called == verb:
            raise StorageError("no such function")

    storage, recorder = Breaks(), Recorder()
    await steps.enqueue(storage, steps.job("held"))
    worker = Worker(storage, {"work": forever, "next": done}, lease=timedelta(milliseconds=300), observers=[recorder])
    async with running(worker):
        assert isinstance((await recorder.seen(Kind.ERROR, 2)).error, StorageError)
        await steps.enqueue(storage, steps.job("next", name="next"))
        assert (await outcome(storage, "next")).kind is OutcomeKind.COMPLETED


async def test_a_side_task_that_fails_ends_the_worker() -> None:
    """A bug in a recovery ends `run` with exactly that error; jobs are given back."""

    class Breaks(MemoryStorage):
        async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
            await crowd_inside.wait()
            raise LookupError("a bug")

    crowd_inside = asyncio.Event()

    async def hang(job: Job) -> None:
        crowd_inside.set()
        await forever(job)

    storage = Breaks()
    await steps.enqueue(storage, steps.job("running"))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LookupError, match="a bug"):
            await Worker(storage, {"work": hang}, options=WorkerOptions(grace=timedelta(0))).run()
    assert await steps.state(storage, "running") is JobState.QUEUED
