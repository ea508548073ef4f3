"""One probe of an unhealthy server: is it well again?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import structlog

from db import LinkState
from federation.http.client import FederationFetch
from federation.http.errors import OutboundError
from federation.http.messages import Response
from federation.protocol.discovery import parse_discover_document
from federation.protocol.errors import ProtocolError
from federation.protocol.relaying import ORIGIN_HEADER
from federation.sealed.peers.registry import KnownServer, Registry
from federation.servers.links import Links

log = structlog.get_logger(__name__)

PROBE_TIMEOUT: Final = timedelta(seconds=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a probe of a server showed; `problem` says why it is not well, and is None if it is."""

    problem: str | None
    another_key: bool = False

    @property
    def well(self) -> bool:
        return self.problem is None


class Probe:
    """Asks a server for `/discover`, and notes the result in the registry."""

    def __init__(self, registry: Registry, fetch: FederationFetch, links: Links, *, own_url: str | None = None) -> None:
        self._registry = registry
        self._own_url = own_url
        self._fetch = fetch
        self._links = links

    async def __call__(self, server: KnownServer) -> int | None:
        """Probe the server and note the result.

        Return 0 if it is well, else how many probes failed in a row; None if it is gone. What fell by deliveries is not
        well by a probe: where the server's link is not up, the probe counts as failed, so that fewer and fewer follow.
        The link's own looks decide there.
        """
        is_well = (await self.look(server)).well
        if is_well and (await self._links.find(server.url)).state is LinkState.UP:
            await self._registry.mark_healthy(server.url, reason="probe")
            return 0
        return await self._registry.count_failed_probe(server.url)

    async def look(self, server: KnownServer) -> Seen:
        """Check whether the server answers `/discover` with the signing key that we know.

        Any other page may be a stranger's. Nothing is noted in the registry.
        """
        seen = await self._see(server, {})
        if seen.another_key and self._own_url is not None:
            # A server that is changing its keys shows everybody the pair that most know, and to a server that names
            # itself, the pair which that server knows.
            named = await self._see(server, {ORIGIN_HEADER: self._own_url})
            seen = named if named.well else seen
        log.info("health_probe", server_url=server.url, healthy=seen.well, problem=seen.problem)
        return seen

    async def _see(self, server: KnownServer, headers: Mapping[str, str]) -> Seen:
        url = f"{server.url}/discover"
        try:
            fetched = await self._fetch(url, headers=headers, timeout=PROBE_TIMEOUT, skip_health_update=True)
            return _seen(fetched.response, server, ours=self._own_url)
        except OutboundError as error:
            return Seen(problem=str(error))


def _seen(response: Response, server: KnownServer, *, ours: str | None) -> Seen:
    if not response.ok:
        moved_to = response.moved_to(server.url, ours=ours)
        named = f", which names {moved_to}" if moved_to else response.still_encoded
        return Seen(problem=f"status {response.status}{named}")
    try:
        document = parse_discover_document(response.body)
    except ProtocolError as error:
        return Seen(problem=f"{error}{response.still_encoded}")
    if document.public_key != server.public_key:
        return Seen(problem="another signing key", another_key=True)
    return Seen(problem=None)
