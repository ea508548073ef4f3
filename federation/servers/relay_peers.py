"""Whom to ask for a relay: healthy peers, and, where there is none, sick ones that turn out to be well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import or_, select
from sqlmodel import col

from db import Database, Server
from federation.http.client import FederationClient
from federation.http.errors import OutboundError
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.protocol.discovery import shows_key
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.servers.registry import Registry
from federation.servers.single_flight import SingleFlight
from workers.clock import monotonic

log = structlog.get_logger(__name__)

MAX_CANDIDATES: Final = 3
MAX_SWEPT: Final = 20
"""How many sick servers one sweep probes in all."""
MAX_PROBES: Final = 10
"""How many of them at once."""
SWEEP_PROBE_TIMEOUT: Final = timedelta(seconds=2)
SWEEP_PAUSE: Final = timedelta(seconds=30)
"""The least time from the end of one sweep to the start of the next."""

_ROWS_LOOKED_AT: Final = 50

Ranking = Callable[[], Awaitable[Sequence[str]]]
"""Tells the URLs of servers that have proven good relays, best first."""


async def unranked() -> Sequence[str]:
    """No server has proven anything."""
    return ()


class RelayPeers:
    """Finds relays in the registry. Those of `ranking` come first, in its order, then those seen last."""

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
        self._sweeps: SingleFlight[list[str]] = SingleFlight()
        self._rest_until = 0.0

    async def healthy(self, target: str, *, without: Collection[str] = ()) -> list[str]:
        """The origins of up to three healthy servers that may relay to *target*, none of them blacklisted."""
        ranked = list(await self._ranking())[:_ROWS_LOOKED_AT]
        healthy = select(col(Server.url)).where(col(Server.is_healthy))
        newest_first = healthy.order_by(col(Server.last_seen).desc()).limit(_ROWS_LOOKED_AT)
        async with self._database.read() as session:
            seen_last = list((await session.execute(newest_first)).scalars())
            known = set(seen_last)
            if unseen := [url for url in ranked if url not in known]:
                known.update((await session.execute(healthy.where(col(Server.url).in_(unseen)))).scalars())
        ordered = dict.fromkeys([url for url in ranked if url in known] + seen_last)
        found: list[str] = []
        for url in ordered:
            origin = await self._usable(url, target)
            if origin is not None and origin not in without and origin not in found:
                found.append(origin)
                if len(found) == MAX_CANDIDATES:
                    break
        return found

    async def sweep(self, target: str) -> list[str]:
        """The origins of up to three servers that were sick and answered just now, those seen last first.

        Asks at most 20 of those whose sickness a direct probe may tell about, ten at a time, two seconds each. All
        callers share one sweep, and within 30 s after one there is no other: the sick are not to be flooded by
        everything that waits for a relay.
        """
        healed = await self._sweeps.run("", lambda: self._sweep(target))
        return [origin for origin in healed if origin != target][:MAX_CANDIDATES]

    async def close(self) -> None:
        """No sweep is under way any more."""
        await self._sweeps.close()

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
        hopeless = [code for code in NetworkErrorCode if not get_threat_policy(code).direct_health_checkable]
        reason = col(Server.unhealthy_reason)
        query = (
            select(col(Server.url))
            .where(col(Server.is_healthy).is_(False), or_(reason.is_(None), reason.not_in(hopeless)))
            .order_by(col(Server.last_seen).desc())
            .limit(_ROWS_LOOKED_AT)
        )
        async with self._database.read() as session:
            urls = list((await session.execute(query)).scalars())
        return [url for url in urls if await self._usable(url, target)][:MAX_SWEPT]

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

    async def _usable(self, url: str, target: str) -> str | None:
        """The origin of the server at *url*, None if it is ourselves, the target, blacklisted or nonsense."""
        try:
            origin = canonical_origin(url)
        except UrlError:
            return None
        if origin in (self._own_url, target) or (await self._registry.standing(url)).blacklisted:
            return None
        return origin
