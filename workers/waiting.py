"""Waiting for the end of a job.

Theory of operation. The waiter subscribes before it enqueues or looks, so it misses no end. An event is only a hint:
the storage's `result` decides whether the job ended, because a new generation of the id may have begun since the event.
If no record is left by then, the event says how the job ended, and has the result of one that was to be kept for a
short time. What is heard before the job that the waiter enqueued is about an older one of the same id. Events can be
lost with a connection, so a waiter that hears nothing for long looks at the result unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from workers.checks import as_positive
from workers.ends import result_of
from workers.errors import (
    JobGoneError,
    JobTimeoutError,
    StorageUnavailable,
)
from workers.jobs import TERMINAL_EVENTS, EnqueueResult, EnqueueStatus, JobEvent, JobEventKind, JobOutcome, OutcomeKind
from workers.storage.base import Storage, Subscription

LOOK_SECONDS: Final = 10.0
"""How long a waiter relies on events before it looks unasked."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""How long it waits before it looks again when the storage did not answer."""


def check_timeout(timeout: timedelta | float) -> timedelta:
    """Return a timeout, in seconds if it is a number, that is above zero.

    Raises:
        ValueError, TypeError: it is not, or is no time.
    """
    return as_positive("the timeout", timeout)


async def end_of(
    storage: Storage, job_id: str, enqueue: Callable[[], Awaitable[EnqueueResult]], timeout: timedelta
) -> bytes:
    """Return the result of the job that `enqueue` enqueues, or that has its id; see `Queue.enqueue_and_wait`."""
    async with _within(timeout, job_id), storage.subscribe(job_id) as events:
        enqueued = await enqueue()
        if enqueued.status is EnqueueStatus.COMPLETED and enqueued.result is not None:
            return enqueued.result
        if enqueued.id != job_id:
            return await _end_of_known(storage, enqueued.id)
        is_new = enqueued.status is EnqueueStatus.QUEUED
        return result_of(job_id, await _end(storage, job_id, events, from_its_enqueue=is_new))


async def wait_for_end(storage: Storage, job_id: str, timeout: timedelta) -> bytes:
    """Return the result of the job, as soon as there is one; see `Queue.wait_for_job_chain_completion`."""
    async with _within(timeout, job_id):
        return await _end_of_known(storage, job_id)


async def _end_of_known(storage: Storage, job_id: str) -> bytes:
    async with storage.subscribe(job_id) as events:
        outcome = await storage.result(job_id)
        if outcome is None and (await storage.status([job_id]))[0] is None:
            outcome = await storage.result(job_id)  # it may have ended between the two looks
            if outcome is None:
                raise JobGoneError(f"there is no job {job_id!r}: it never was, or its record is over")
        return result_of(job_id, outcome or await _end(storage, job_id, events))


@asynccontextmanager
async def _within(timeout: timedelta, job_id: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout.total_seconds()) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise JobTimeoutError(f"job {job_id!r} did not end within {timeout}; it goes on without its waiter") from None


async def _end(storage: Storage, job_id: str, events: Subscription, *, from_its_enqueue: bool = False) -> JobOutcome:
    patience, begun = LOOK_SECONDS, not from_its_enqueue
    told: JobEvent | None = None
    while True:
        event = await _next(events, patience)
        if event is not None and event.kind is JobEventKind.QUEUED:
            begun, told = True, None
        if event is not None and event.kind not in TERMINAL_EVENTS:
            continue
        told = event if event is not None and begun else told
        try:
            outcome = await storage.result(job_id)
            if outcome is None and (begun or event is None):
                outcome = await _end_without_record(storage, job_id, told)
        except StorageUnavailable:
            patience = LOOK_AGAIN_SECONDS
            continue
        if outcome is not None:
            return outcome
        patience = LOOK_SECONDS


async def _next(events: Subscription, patience: float) -> JobEvent | None:
    try:
        async with asyncio.timeout(patience):
            return await events.get()
    except TimeoutError:
        return None


async def _end_without_record(storage: Storage, job_id: str, event: JobEvent | None) -> JobOutcome | None:
    """Tell how a job ended that has no record any more, by the event of its end; None if it has not ended.

    Raises:
        JobGoneError: it may have completed, and its result is lost.
    """
    if (await storage.status([job_id]))[0] is not None:
        return None
    match event:
        case JobEvent(kind=JobEventKind.FAILED):
            return JobOutcome(kind=OutcomeKind.FAILED)
        case JobEvent(kind=JobEventKind.CANCELLED):
            return JobOutcome(kind=OutcomeKind.CANCELLED)
        case JobEvent(result=bytes() as result):
            return JobOutcome(kind=OutcomeKind.COMPLETED, result=result)
        case JobEvent():
            raise JobGoneError(f"job {job_id!r} completed, but its result is not kept any more; keep it for longer")
        case None:
            raise JobGoneError(f"job {job_id!r} is not there any more; it was removed, or its result not kept")
