"""Which peers to ask for a relay: healthy ones of different domains, or else sick ones that turn out to be well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Final

import structlog

from db import Database
from federation.base.cache import LoadingCache, SingleFlight
from federation.http.client import FederationClient
from federation.http.errors import OutboundError
from federation.protocol.discovery import shows_key
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.registry import Registry
from federation.sealed.relays.domains import first_of_each_domain, registrable_domain
from federation.sealed.relays.order import MAX_CONSIDERED, healthy_by_merit, sick_by_merit
from workers.clock import monotonic

log = structlog.get_logger(__name__)

MAX_CANDIDATES: Final = 3
MAX_SWEPT: Final = 20
"""How many sick servers one sweep probes in all."""
MAX_PROBES: Final = 10
"""How many sick servers are probed at once."""
SWEEP_PROBE_TIMEOUT: Final = timedelta(seconds=2)
SWEEP_PAUSE: Final = timedelta(seconds=30)
"""The least time from the end of one sweep to the start of the next."""
ORDER_TTL: Final = timedelta(seconds=30)
"""How old the order of candidates may be. Their health and the blacklist are checked at each choice."""

Ranking = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of servers that have proven good relays, best first."""


async def unranked() -> Sequence[str]:
    """Return an empty ranking: no server has proven anything."""
    return ()


class RelayPeers:
    """Finds relays in the registry: first those of `ranking`, in its order, then the others by merit."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        client: FederationClient,
        *,
        own_url: str,
        ranking: Ranking = unranked,
    ) -> None:
        self._database = database
        self._registry = registry
        self._client = client
        self._own_url = own_url
        self._ranking = ranking
        self._by_merit = LoadingCache(lambda _: healthy_by_merit(database), ttl=ORDER_TTL, max_entries=1)
        self._sweeps: SingleFlight[list[str]] = SingleFlight()
        self._rest_until = 0.0

    async def healthy(self, target: str, *, without: Collection[str] = ()) -> list[str]:
        """Return the origins of up to three healthy servers that may relay to *target*.

        Each is of another domain, and none is blacklisted.
        """
        ranked = list(await self._ranking())[:MAX_CONSIDERED]
        found: dict[str, str] = {}  # by domain
        for url in dict.fromkeys([*ranked, *await self._by_merit.get("")]):
            origin = self._foreign_origin(url, target)
            if origin is None or origin in without or registrable_domain(origin) in found:
                continue
            standing = await self._registry.standing(url)
            if standing.server is not None and standing.server.is_healthy and not standing.blacklisted:
                found[registrable_domain(origin)] = origin
                if len(found) == MAX_CANDIDATES:
                    break
        if not found:
            self._by_merit.drop("")  # a server that is healthy next time may be missing in this order
        return list(found.values())

    async def sweep(self, target: str) -> list[str]:
        """Probe unhealthy servers. Return the origins of up to three that answered, best first, each of another domain.

        It asks at most 20 of those whose health a direct probe may tell, ten at a time, two seconds each. All callers
        share one sweep, and within 30 s after one there is no other: the sick servers must not be flooded by everything
        that waits for a relay.
        """
        healed = await self._sweeps.run("", lambda: self._sweep(target))
        return first_of_each_domain(origin for origin in healed if origin != target)[:MAX_CANDIDATES]

    async def close(self) -> None:
        """Cancel the sweep and everything that is being read, and wait for their end."""
        await self._sweeps.close()
        await self._by_merit.close()

    async def _sweep(self, target: str) -> list[str]:
        if monotonic() < self._rest_until:
            return []
        try:
            sick = await self._sick(target)
            slots = asyncio.Semaphore(MAX_PROBES)
            async with asyncio.TaskGroup() as group:
                probes = {url: group.create_task(self._heals(url, slots)) for url in sick}
        finally:
            self._rest_until = monotonic() + SWEEP_PAUSE.total_seconds()
        healed = [canonical_origin(url) for url, probe in probes.items() if probe.result()]
        if healed:
            log.info("relay_sweep", probed=len(sick), healed=len(healed))
        else:
            log.warning("relay_stranded", probed=len(sick))
        return healed

    async def _sick(self, target: str) -> list[str]:
        urls = [url for url in await sick_by_merit(self._database) if self._foreign_origin(url, target)]
        return [url for url in urls if not await self._registry.is_blacklisted(url)][:MAX_SWEPT]

    async def _heals(self, url: str, slots: asyncio.Semaphore) -> bool:
        server = (await self._registry.standing(url)).server
        if server is None:
            return False
        async with slots:
            try:
                response = await self._client.fetch(f"{canonical_origin(url)}/discover", timeout=SWEEP_PROBE_TIMEOUT)
            except OutboundError:
                return False
        if not (response.ok and shows_key(response.body, server.public_key)):
            return False
        await self._registry.mark_healthy(url, reason="sweep")
        return True

    def _foreign_origin(self, url: str, target: str) -> str | None:
        """Return the origin of the server at *url*, or None if it is this node, the target or no valid URL."""
        try:
            origin = canonical_origin(url)
        except UrlError:
            return None
        return None if origin in (self._own_url, target) else origin
