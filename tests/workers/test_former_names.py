"""What an application wrote for the previous version works, and says once what it is called now."""

from __future__ import annotations

from datetime import timedelta

import pytest

import federation
from tests.workers.running import Recorder
from workers import Job, Queue, Retry, Snooze, WorkerEventKind
from workers.storage.memory import MemoryStorage

SOON = timedelta(seconds=5)


async def test_a_lease_may_be_called_visibility_timeout() -> None:
    watched = Recorder()
    with pytest.warns(DeprecationWarning, match=r"called Queue\(lease=\)"):
        queue = Queue(MemoryStorage(), visibility_timeout=SOON, observers=[watched])
    queue.execute(_nothing)
    async with queue:
        await queue.enqueue_and_wait("anything")
    assert [event.claim.lease for event in watched.of(WorkerEventKind.ACTIVE) if event.claim] == [SOON]


def test_a_snooze_may_be_a_postponed_retry() -> None:
    with pytest.warns(DeprecationWarning, match="raise Snooze"):
        former = Retry("busy", delay=SOON, postponed=True)
    present = Snooze(SOON, reason="busy")
    assert isinstance(present, Retry)
    assert (former.delay, former.counted, former.snoozed, str(former)) == (
        present.delay,
        present.counted,
        present.snoozed,
        str(present),
    )


def test_a_queue_of_jobs_may_be_called_bull_queue() -> None:
    with pytest.warns(DeprecationWarning, match="called JobQueue"):
        assert getattr(federation, "BullQueue") is federation.JobQueue  # noqa: B009 - no checker knows the name any more


async def _nothing(job: Job) -> None:
    """Do nothing."""
