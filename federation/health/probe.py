"""One look at a sick server: is it well again?"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import structlog

from federation.http.errors import OutboundError
from federation.http.gates import FederationFetch
from federation.protocol.discovery import parse_discover_document
from federation.protocol.errors import ProtocolError
from federation.servers.registry import KnownServer, Registry

log = structlog.get_logger(__name__)

PROBE_TIMEOUT: Final = timedelta(seconds=8)


class Probe:
    """Asks a server for `/discover`, and notes in the registry what came of it."""

    def __init__(self, registry: Registry, fetch: FederationFetch) -> None:
        self._registry = registry
        self._fetch = fetch

    async def __call__(self, server: KnownServer) -> int | None:
        """The server is marked healthy (0), or has one more failed probe (how many in a row); None if it is gone."""
        if await self.problem(server) is None:
            await self._registry.mark_healthy(server.url, reason="probe")
            return 0
        return await self._registry.count_failed_probe(server.url)

    async def problem(self, server: KnownServer) -> str | None:
        """Why the server is not well, None if it answers `/discover` with the signing key we know: any other page may
        be a stranger's. Nothing is noted in the registry.
        """
        try:
            fetched = await self._fetch(f"{server.url}/discover", timeout=PROBE_TIMEOUT, skip_health_update=True)
            well = (
                fetched.response.ok and parse_discover_document(fetched.response.body).public_key == server.public_key
            )
            problem = None if well else f"status {fetched.response.status}, or another signing key"
        except (OutboundError, ProtocolError) as error:
            problem = str(error)
        log.info("health_probe", server_url=server.url, healthy=problem is None, problem=problem)
        return problem
