"""The quick probes of an unhealthy server: when each is due on the health-check queue, and what such a job does."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import structlog
from pydantic import ValidationError

from federation.base.queues.job_data import HEALTH_CHECK_JOB, HealthCheckJob
from federation.base.queues.queue import JobQueue
from federation.http.threat_policy import get_threat_policy
from federation.sealed.peers.probe import Probe
from federation.sealed.peers.registry import Registry, ScheduleHealthCheck
from workers import Job, UnrecoverableError

log = structlog.get_logger(__name__)


class HealthSchedule:
    """Schedules probe number n of a server after `first_delay + n * step`: by default 5, 15, 25, 35, 45 minutes."""

    def __init__(self, queue: JobQueue, *, first_delay: timedelta, step: timedelta) -> None:
        self._queue = queue
        self._first_delay = first_delay
        self._step = step

    async def __call__(self, server_url: str, attempt: int) -> None:
        """Add the probe to the queue. While it is there, scheduling the same one again does nothing."""
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
    """Return the probe's job id, which is the same in every implementation that shares the queue."""
    return f"{HEALTH_CHECK_JOB}_{hashlib.sha256(server_url.encode()).hexdigest()[:16]}_{attempt}"


class HealthCheckProcessor:
    """Callable with a job of the health-check queue; it makes `checks` probes in all, then leaves the server alone."""

    def __init__(self, *, registry: Registry, probe: Probe, schedule: ScheduleHealthCheck, checks: int) -> None:
        self._registry = registry
        self._probe = probe
        self._schedule = schedule
        self._checks = checks

    async def __call__(self, job: Job) -> None:
        """Probe the server, and either mark it healthy or count a failed probe and schedule the next one.

        Nothing happens for a server that is gone, healthy, blacklisted, or unhealthy for a reason that a probe cannot
        cure.
        """
        try:
            server_url = HealthCheckJob.model_validate(job.payload).server_url
        except ValidationError:
            raise UnrecoverableError(f"the data of job {job.id!r} is malformed: serverUrl must be a text") from None
        server = await self._registry.find(server_url)
        if server is None or server.is_healthy:
            return
        if not get_threat_policy(server.unhealthy_reason).direct_health_checkable:
            return
        if await self._registry.is_blacklisted(server_url):
            return
        count = await self._probe(server)
        if count:
            await self._go_on(server_url, count)

    async def _go_on(self, server_url: str, count: int) -> None:
        if count < self._checks:
            await self._schedule(server_url, count)
        else:
            log.warning("health_checks_exhausted", server_url=server_url, checks=count)
