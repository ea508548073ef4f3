"""When a sick server is probed next."""

from __future__ import annotations

import hashlib
from datetime import timedelta

from federation.base.bull_queue import BullQueue
from federation.base.jobs import HEALTH_CHECK_JOB, HealthCheckJob


class HealthSchedule:
    """Schedules probe number n of a server after `first_delay + n * step`: by default 5, 15, 25, 35, 45 minutes."""

    def __init__(self, queue: BullQueue, *, first_delay: timedelta, step: timedelta) -> None:
        self._queue = queue
        self._first_delay = first_delay
        self._step = step

    async def __call__(self, server_url: str, attempt: int) -> None:
        """The probe is in the queue; while it is, scheduling the same one again does nothing."""
        delay = self._first_delay + attempt * self._step
        await self._queue.add(
            HEALTH_CHECK_JOB,
            HealthCheckJob(server_url=server_url).to_wire(),
            {
                "jobId": health_check_id(server_url, attempt),
                "delay": delay / timedelta(milliseconds=1),
                "removeOnComplete": True,
                "removeOnFail": True,
            },
        )


def health_check_id(server_url: str, attempt: int) -> str:
    """The probe's job id, the same in every implementation that shares the queue."""
    return f"{HEALTH_CHECK_JOB}_{hashlib.sha256(server_url.encode()).hexdigest()[:16]}_{attempt}"
