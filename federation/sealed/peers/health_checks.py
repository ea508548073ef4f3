"""Probes of unhealthy servers: quick ones on the health-check queue, then others, hours apart.

Theory of operation. A long outage heals by itself: nothing is planned ahead, the registry's row says when a server was
last probed and how often that failed, and `due_at` computes the next date from it. So a lost queue, a restart or a new
version loses no probe, and any process may make it. Servers whose failures forbid direct probes (`DNS_BLOCKED`: the
name may lead elsewhere by now) are probed in the same way, since nothing else ever would.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy import bindparam, select

from db import Database, Server
from federation.base.queues.job_data import HEALTH_CHECK_JOB, HealthCheckJob
from federation.base.queues.queue import JobQueue
from federation.http.threat_policy import get_threat_policy
from federation.sealed.peers.probe import Probe
from federation.sealed.peers.registry import KnownServer, Registry, ScheduleHealthCheck
from federation.servers.link_rules import SKEW
from workers import Job, UnrecoverableError
from workers.clock import Clock, SystemClock

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


JITTER: Final = 0.1
MAX_SERVERS: Final = 100
"""How many servers one run probes; those due longest come first."""
AT_ONCE: Final = 10
PAGE: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """When unhealthy servers are probed.

    There are `checks` quick probes, the n-th of which comes `quick_first + n * quick_step` after the one before. The
    next comes `first` later, and each further one after twice as long, up to `maximum`.
    """

    checks: int
    quick_first: timedelta
    quick_step: timedelta
    first: timedelta = timedelta(hours=1)
    maximum: timedelta = timedelta(hours=24)

    def due_at(self, server: KnownServer, seen_at: datetime) -> datetime:
        """Return when to probe the unhealthy server, which was last probed at `seen_at`.

        By default this is 1, 2, 4, 8, 16, 24, 24 ... hours later, 10 % more or less depending on the server's name. A
        server whose quick probes are under way is due once the next of them is overdue: then its job was lost.
        """
        probeable = get_threat_policy(server.unhealthy_reason).direct_health_checkable
        failed = server.health_check_attempts
        doublings = max(failed - self.checks, 0) if probeable else failed
        wait = min(self.first * (1 << min(doublings, 20)), self.maximum)
        if probeable and failed < self.checks:
            wait = max(wait, 2 * (self.quick_first + failed * self.quick_step))
        spread = zlib.crc32(f"{server.url} {failed}".encode()) / 2**32 * 2 - 1
        return seen_at + wait * (1 + JITTER * spread)


class LongRangeProbes:
    """Probes the unhealthy servers that are due: 10 at a time, and up to 100 in a run.

    So a thousand dead servers cost one process a few seconds a minute.
    """

    def __init__(
        self, database: Database, *, registry: Registry, probe: Probe, plan: ProbePlan, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._registry = registry
        self._probe = probe
        self._plan = plan

    async def __call__(self) -> Mapping[str, object]:
        """Probe the servers that are due. Return how many there were, and how many of them are well again.

        Raises:
            SQLAlchemyError: the database failed.
        """
        due = await self._due(self._clock.now())
        slots = asyncio.Semaphore(AT_ONCE)

        async def probe(server: KnownServer) -> bool:
            async with slots:
                if await self._registry.is_blacklisted(server.url):
                    return False
                return await self._probe(server) == 0

        async with asyncio.TaskGroup() as group:
            probes = [group.create_task(probe(server)) for server in due[:MAX_SERVERS]]
        return {
            "due": len(due),
            "probed": len(probes),
            "healed": sum(task.result() for task in probes),
        }

    async def _due(self, now: datetime) -> list[KnownServer]:
        """Return the servers that are due, those due longest first. One seen in the future was by a wrong clock."""
        found: list[tuple[datetime, KnownServer]] = []
        after = ""
        while True:
            page = await self._page(after)
            for server, seen_at in page:
                if (due := self._plan.due_at(server, seen_at)) <= now or seen_at > now + SKEW:
                    found.append((due, server))
            if len(page) < PAGE:
                return [server for _, server in sorted(found, key=lambda each: each[0])]
            after = page[-1][0].url

    async def _page(self, after: str) -> list[tuple[KnownServer, datetime]]:
        rows = await self._database.rows(_SICK, {"after": after, "most": PAGE})
        return [(KnownServer(**{name: row._mapping[name] for name in _KNOWN}), row.updated_at) for row in rows]


_KNOWN: Final = tuple(field.name for field in fields(KnownServer))
_TABLE = Server.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_SICK = (
    select(*(_TABLE.c[name] for name in _KNOWN), _TABLE.c.updated_at)
    .where(_TABLE.c.is_healthy.is_(False), _TABLE.c.url > bindparam("after"))
    .order_by(_TABLE.c.url)
    .limit(bindparam("most"))
)
