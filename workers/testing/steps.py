"""The short steps that cases are made of."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Final

from workers.checks import new_id
from workers.deduplication import Deduplication
from workers.jobs import (
    DROP,
    Cancelled,
    Claim,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    JobEvent,
    JobEventKind,
    JobState,
    JobStatus,
    NewJob,
    Recovery,
    Released,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.limits import WHOLE_QUEUE, HeldBack, Limit, LimitKey
from workers.retry import RetryPolicy
from workers.storage.abilities import KeepsLimits
from workers.storage.base import Storage, Subscription
from workers.testing.harness import Harness

WORKER: Final = "worker"
NAME: Final = "work"
HOUR: Final = timedelta(hours=1)
LEASE: Final = timedelta(minutes=10)
"""A lease that does not expire while a case runs."""

PATIENCE: Final = 10.0
"""How many seconds to wait for what should happen.

It must not be more: waits look by themselves after 10 s and reapers after 15 s, which would hide a lost notification.
"""

ERROR: Final = ErrorInfo(type="ValueError", message="the handler said no", stack="line 1\nline 2")
SNOOZED: Final = ErrorInfo(type="Snooze", message="the handler snoozed the job")


def job(
    job_id: str | None = None,
    *,
    name: str = NAME,
    payload: bytes = b"{}",
    delay: timedelta = timedelta(0),
    max_attempts: int = 3,
    keep: Retention = HOUR,
    keep_completed: Retention | None = None,
    keep_failed: Retention | None = None,
    priority: int = 0,
    ordering_key: str | None = None,
    limit_key: LimitKey | None = None,
    fair_key: str | None = None,
    backoff: RetryPolicy | None = None,
    chain_index: int = 0,
    deduplication: Deduplication | None = None,
) -> NewJob:
    """Make a job with an id of its own, kept for an hour however it ends, unless told otherwise for one kind of end."""
    return NewJob(
        id=new_id() if job_id is None else job_id,
        name=name,
        payload=payload,
        delay=delay,
        max_attempts=max_attempts,
        keep_completed=keep if keep_completed is None else keep_completed,
        keep_failed=keep if keep_failed is None else keep_failed,
        priority=priority,
        ordering_key=ordering_key,
        limit_key=limit_key,
        fair_key=fair_key,
        backoff=backoff,
        chain_index=chain_index,
        deduplication=deduplication,
    )


def completed(claim: Claim, result: bytes = b"null", *, keep: Retention | None = None) -> Completed:
    return Completed(claim=claim, result=result, keep=keep)


def failed(claim: Claim) -> Failed:
    return Failed(claim=claim, error=ERROR)


def stopped(claim: Claim, *, keep: Retention | None = None) -> Cancelled:
    """Make the settlement of a worker that stopped because the job was cancelled."""
    return Cancelled(claim=claim, keep=keep)


def retried(claim: Claim, delay: timedelta = timedelta(0), *, counted: bool = True) -> Retried:
    return Retried(claim=claim, delay=delay, error=ERROR, counted=counted)


def snoozed(claim: Claim, delay: timedelta = timedelta(0)) -> Retried:
    """Make the settlement of an attempt that its handler calls none."""
    return Retried(claim=claim, delay=delay, error=SNOOZED, counted=False, snoozed=True)


def dropped(claim: Claim) -> Completed:
    return completed(claim, keep=DROP)


def continued(
    claim: Claim,
    *,
    name: str = NAME,
    payload: bytes = b"{}",
    delay: timedelta = timedelta(0),
    keep: Retention = HOUR,
    priority: int = 0,
    ordering_key: str | None = None,
    limit_key: LimitKey | None = None,
) -> Continued:
    """Make the settlement that continues the job as the next link of its chain."""
    then = job(
        claim.job_id,
        name=name,
        payload=payload,
        delay=delay,
        keep=keep,
        priority=priority,
        ordering_key=ordering_key,
        limit_key=limit_key,
    )
    return Continued(claim=claim, then=replace(then, chain_index=claim.chain_index + 1))


def released(claim: Claim) -> Released:
    return Released(claim=claim)


async def claim(storage: Storage, limit: int = 1, *, worker_id: str = WORKER, lease: timedelta = LEASE) -> list[Claim]:
    """Claim jobs of any name."""
    return await storage.claim(worker_id, leases={"*": lease}, limit=limit)


async def claim_one(storage: Storage, *, worker_id: str = WORKER, lease: timedelta = LEASE) -> Claim:
    """Claim the one job that is claimable now."""
    claims = await claim(storage, worker_id=worker_id, lease=lease)
    assert len(claims) == 1, "a job should be claimable"
    return claims[0]


async def next_claim(
    storage: Storage, *, worker_id: str = WORKER, leases: Mapping[str, timedelta] | None = None
) -> Claim:
    """Claim the next job that becomes claimable, as a worker does: claim, and wait when there is none.

    The wait lasts much longer than this function's patience, so a lost wake-up fails here.
    """
    wanted = {"*": LEASE} if leases is None else leases
    async with asyncio.timeout(PATIENCE):
        while not (claims := await storage.claim(worker_id, leases=wanted, limit=1)):
            await storage.wait(tuple(wanted), timeout=timedelta(seconds=3 * PATIENCE))
    return claims[0]


async def settle(storage: Storage, settlement: Settlement) -> SettleOutcome:
    """Settle this one attempt and return the outcome."""
    outcomes = await storage.settle([settlement])
    assert len(outcomes) == 1, "one outcome per settlement"
    return outcomes[0]


async def apply(storage: Storage, *settlements: Settlement) -> None:
    """Settle the attempts, each of which must still hold its job."""
    for outcome in await storage.settle(settlements):
        assert outcome.status is SettleStatus.APPLIED, outcome


async def enqueue(storage: Storage, *jobs: NewJob) -> None:
    """Enqueue the jobs, each of which must be new in this generation."""
    for result in await storage.enqueue(jobs):
        assert result.status.value == "queued", result


async def declare(storage: Storage, **limits: Limit) -> None:
    """Declare the limits by their names; `whole_queue` is that of all jobs together."""
    assert isinstance(storage, KeepsLimits)
    names = {WHOLE_QUEUE if name == "whole_queue" else name: limit for name, limit in limits.items()}
    await storage.declare_limits(names)


async def held_back(storage: Storage, job_id: str) -> HeldBack | None:
    """Return which limit keeps the job back."""
    assert isinstance(storage, KeepsLimits)
    return (await storage.held_back([job_id]))[0]


async def state(storage: Storage, job_id: str) -> JobState | None:
    """Return the job's state now."""
    found = (await storage.status([job_id]))[0]
    return None if found is None else found.state


async def status(storage: Storage, job_id: str) -> JobStatus:
    """Return the job as it stands; it must exist."""
    found = (await storage.status([job_id]))[0]
    assert found is not None, f"job {job_id!r} should exist"
    return found


async def recover(
    harness: Harness, storage: Storage, expected: int, *, limit: int = 1_000, max_stalls: int = 3
) -> Recovery:
    """Recover until there are `expected` jobs, in as many passes as the storage declares.

    The leases must have expired. On a real clock there are a few passes more, for a machine that is busy.
    """
    requeued: list[str] = []
    given_up: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while len(requeued) + len(given_up) < expected:
            for _ in range(harness.capabilities.recovery_passes):
                recovery = await storage.recover(limit, max_stalls=max_stalls)
                requeued += recovery.requeued
                given_up += recovery.failed
            assert len(requeued) + len(given_up) >= expected or not harness.moves_time, "recovery missed a job"
            if len(requeued) + len(given_up) < expected:
                await harness.advance(harness.moment)
    return Recovery(requeued=tuple(requeued), failed=tuple(given_up))


async def crash(harness: Harness, storage: Storage, *, limit: int = 1, worker_id: str = WORKER) -> list[Claim]:
    """Let a worker claim jobs and disappear, until their leases have expired."""
    claims = await claim(storage, limit, worker_id=worker_id, lease=harness.moment)
    assert len(claims) == limit, f"{limit} jobs should be claimable"
    await harness.advance(harness.moment)
    return claims


async def expect(subscription: Subscription, *kinds: JobEventKind) -> list[JobEvent]:
    """Return the next events, which must be of these kinds in this order."""
    async with asyncio.timeout(PATIENCE):
        events = [await subscription.get() for _ in kinds]
    assert [event.kind for event in events] == list(kinds)
    return events


async def until(holds: Callable[[], object]) -> None:
    """Wait until `holds`, called every few milliseconds, returns something true, or an awaitable of it.

    It waits longer than `PATIENCE`: nobody has to be notified here, so only a slow machine can be the reason.
    """
    async with asyncio.timeout(3 * PATIENCE):
        while not await _answer(holds()):  # noqa: ASYNC110 - nobody tells of what is asked for
            await asyncio.sleep(0.005)


async def _answer(said: object) -> object:
    return await said if inspect.isawaitable(said) else said


@asynccontextmanager
async def background(*tasks: asyncio.Task[object]) -> AsyncIterator[None]:
    """Run the tasks beside the block, and end them with it."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ids(claims: Sequence[Claim]) -> list[str]:
    """Return the ids of the jobs claimed, in the order of the claims."""
    return [held.job_id for held in claims]
