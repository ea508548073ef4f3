"""One probe of one sick server."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import structlog
from pydantic import ValidationError

from federation.http.errors import OutboundError
from federation.http.gates import FederationFetch
from federation.http.threat_policy import get_threat_policy
from federation.protocol.discovery import parse_discover_document
from federation.protocol.errors import ProtocolError
from federation.queues import HealthCheckJob
from federation.servers.registry import KnownServer, Registry, ScheduleHealthCheck
from workers import Job, UnrecoverableError

log = structlog.get_logger(__name__)

PROBE_TIMEOUT: Final = timedelta(seconds=8)


class HealthCheckProcessor:
    """Callable with a job of the health-check queue; `checks` probes in all, then the server is left alone."""

    def __init__(
        self, *, registry: Registry, fetch: FederationFetch, schedule: ScheduleHealthCheck, checks: int
    ) -> None:
        self._registry = registry
        self._fetch = fetch
        self._schedule = schedule
        self._checks = checks

    async def __call__(self, job: Job) -> None:
        """The server is healthy again, or has one more failed probe and the next one scheduled.

        Nothing happens for a server that is gone, healthy, blacklisted, or sick of something a probe cannot cure.
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
        if await self._is_well(server):
            await self._registry.mark_healthy(server_url, reason="probe")
        else:
            await self._go_on(server_url)

    async def _is_well(self, server: KnownServer) -> bool:
        """Whether the server answers `/discover` with the signing key we know: any other page may be a stranger's."""
        try:
            fetched = await self._fetch(f"{server.url}/discover", timeout=PROBE_TIMEOUT, skip_health_update=True)
            well = (
                fetched.response.ok and parse_discover_document(fetched.response.body).public_key == server.public_key
            )
            problem = None if well else f"status {fetched.response.status}, or another signing key"
        except (OutboundError, ProtocolError) as error:
            well, problem = False, str(error)
        log.info("health_probe", server_url=server.url, healthy=well, problem=problem)
        return well

    async def _go_on(self, server_url: str) -> None:
        count = await self._registry.count_failed_probe(server_url)
        if count is None:
            return
        if count < self._checks:
            await self._schedule(server_url, count)
        else:
            log.warning("health_checks_exhausted", server_url=server_url, checks=count)
