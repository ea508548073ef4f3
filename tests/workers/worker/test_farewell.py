"""Who is listed as a worker: those that live, as long as they do, and for a while those that died."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import pytest

from tests.patience import eventually
from tests.workers.running import broken, done, forever, running
from tests.workers.worker.stopping import HOUR, NO_GRACE, run_to_the_end
from workers import WorkerOptions
from workers.jobs import MISSED_AFTER, WorkerInfo
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import Harness, steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import until
from workers.worker import Worker, shutdown
from workers.worker import worker as module
from workers.worker.handlers import HandlerFunction


async def listed(storage: Storage) -> list[str]:
    return [worker.id for worker in await storage.workers()]


@pytest.mark.spread("harness")
@pytest.mark.parametrize("handler", [done, forever], ids=["idle", "busy"])
async def test_a_worker_that_stopped_is_listed_no_more(harness: Harness, handler: HandlerFunction) -> None:
    """At once, also if it had to give jobs back; others are."""
    storage = await harness.open()
    await steps.enqueue(storage, steps.job("job"))
    stays, goes = (
        Worker(storage, {"work": handler}, options=WorkerOptions(worker_id=name, grace=NO_GRACE))
        for name in ("stays", "goes")
    )
    async with running(stays):
        async with run_to_the_end(goes):
            await eventually(lambda: listed(storage), lambda found: set(found) == {"stays", "goes"})
            goes.stop()
        assert await listed(storage) == ["stays"]
    assert await listed(storage) == []


async def test_a_worker_that_leaves_jobs_behind_stays_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until their leases have run out somebody may ask who has them."""
    monkeypatch.setattr(module, "FORCED_STOP_SECONDS", 0.05)
    storage, faults = faulty(MemoryStorage())
    broken(faults, "settle")
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": forever}, options=WorkerOptions(worker_id="left", grace=NO_GRACE))
    async with run_to_the_end(worker):
        await until(lambda: worker.running == 1)
        worker.stop()
    assert await listed(storage) == ["left"]


class Deaf(MemoryStorage):
    """Never answers a farewell."""

    async def farewell(self, worker_id: str) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("answers", [True, False], ids=["refuses", "is silent"])
async def test_a_storage_that_hears_no_farewell_holds_up_no_stop(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Nor does it keep its connection."""
    monkeypatch.setattr(shutdown, "FAREWELL_SECONDS", 0.05)
    storage, faults = faulty(MemoryStorage() if answers else Deaf())
    broken(faults, "farewell")
    if not answers:
        broken(faults, "farewell", down=False)
    counted, calls = counting(storage)
    worker = Worker(counted, {"work": done}, options=WorkerOptions(worker_id="stopped"))
    async with run_to_the_end(worker) as task:
        await until(lambda: calls["wait"] == 1)
        worker.stop()
    await task
    assert calls["disconnect"] == calls["connect"] == 1
    assert await listed(storage) == ["stopped"]


async def test_an_idle_worker_is_heard_of() -> None:
    """However long it may rely on being woken."""
    timeouts: list[timedelta] = []

    class Noted(MemoryStorage):
        async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
            timeouts.append(timeout)
            await super().wait(names, timeout=timeout)

    async with running(Worker(Noted(), {"work": done}, options=WorkerOptions(poll_interval=HOUR))):
        await until(lambda: timeouts)
    assert timeouts[0] * 1.5 <= MISSED_AFTER


async def test_a_full_worker_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its leases are."""
    monkeypatch.setattr(module, "HEARD_EVERY", timedelta(milliseconds=20))
    storage, calls = counting(MemoryStorage())
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": forever}, concurrency=1, lease=HOUR)):
        await until(lambda: calls["renew"] >= 2)


@pytest.mark.parametrize(("seconds", "silent"), [(75, False), (94, True)])
def test_a_worker_that_is_not_heard_of_counts_as_gone(seconds: int, silent: bool) -> None:
    """Half as long again as it takes one that lives: nobody believes for minutes that what died still runs."""
    seen_at = datetime.now(UTC) - timedelta(seconds=seconds)
    assert WorkerInfo(id="w", seen_at=seen_at, claims=0).is_silent is silent
