"""Servers whose memory is used up."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta

from workers.errors import StorageFull
from workers.jobs import CancelResult, JobState
from workers.storage.base import Storage
from workers.testing.case import FILLS, WORKS_WHEN_FULL, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    enqueue,
    failed,
    job,
    released,
    retried,
    state,
    stopped,
)


@case(guarantees=(1, 11), needs=(FILLS,))
async def a_full_server_refuses_jobs(harness: Harness, storage: Storage) -> None:
    """A job for which there is no room is refused with `StorageFull`, and taken when there is."""
    await enqueue(storage, job("before"))
    await harness.fill()
    assert await _is_refused(storage.enqueue([job("late")]))
    await harness.make_room()
    assert await state(storage, "late") is None
    assert await state(storage, "before") is JobState.QUEUED
    await enqueue(storage, job("late"))


@case(guarantees=(11,), needs=(FILLS, WORKS_WHEN_FULL))
async def a_full_server_is_worked_off(harness: Harness, storage: Storage) -> None:
    """Jobs are waited for, claimed, renewed, ended in every way, recovered, paused, cancelled and removed as ever."""
    names = ("a", "b", "c", "d", "e", "f")
    await enqueue(storage, *(job(name) for name in names), job("cancelled", delay=HOUR), job("gone", delay=HOUR))
    await harness.fill()
    await storage.pause()
    await storage.resume()
    await storage.wait(["work"], timeout=timedelta(0))
    held = {one.job_id: one for one in await claim(storage, len(names))}
    assert (await storage.renew([*held.values()])).lost == {}
    await apply(storage, completed(held["a"]), failed(held["b"]), retried(held["c"], HOUR))
    await apply(storage, stopped(held["d"]), released(held["e"]))
    assert await storage.cancel("cancelled") is CancelResult.CANCELLED
    assert await storage.cancel("f") is CancelResult.PROCESSING
    assert await storage.remove(["gone"]) == 1
    assert await storage.retry(["b"]) == 1
    assert await storage.promote(["c"]) == 1
    await storage.recover(10)
    await storage.sweep(10)
    assert {(await claim_one(storage)).job_id for _ in range(3)} == {"b", "c", "e"}
    await storage.wait(["work"], timeout=timedelta(0))
    assert await _is_refused(storage.enqueue([job("late")]))
    await harness.make_room()
    assert await state(storage, "a") is JobState.COMPLETED
    assert await state(storage, "d") is JobState.CANCELLED


async def _is_refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except StorageFull:
        return True
    return False
