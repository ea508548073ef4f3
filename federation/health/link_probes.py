"""Probes of servers whose links are not up, so that what is held for them goes out soon after they return.

Theory of operation. The link says when its next probe is due, and a probe begins with moving that date, if it is still
the same. So only one of all processes probes, and a process that dies while probing costs half a minute. A server that
fell silent is back if its `/discover` shows the registered key. If something answered all the time, or only relays
reach the server, only a delivery that gets through proves anything: then a canary is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db import LinkState
from federation.base.logs import crash
from federation.health.probe import Probe
from federation.http.errors import OutboundError
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.servers.discovery import DiscoverServer, DiscoveryError
from federation.servers.link_rules import Link
from federation.servers.links import Links
from federation.servers.registry import KnownServer, Registry

log = structlog.get_logger(__name__)

AT_ONCE: Final = 10

SendCanary = Callable[[str], Awaitable[bool]]
"""Sends one held delivery ahead to the server; returns False if none is held for it."""


class LinkProbes:
    """Probes the servers that are due, ten at a time."""

    def __init__(
        self, *, links: Links, registry: Registry, probe: Probe, discover: DiscoverServer, send_canary: SendCanary
    ) -> None:
        self._links = links
        self._registry = registry
        self._probe = probe
        self._discover = discover
        self._send_canary = send_canary

    async def tick(self) -> int:
        """Probe the servers that are due. Return how many there were.

        Raises:
            SQLAlchemyError: the database did not answer; they are due again in half a minute.
        """
        due = await self._links.due_for_probe(AT_ONCE)
        taken = [link for link in due if await self._links.take_probe(link)]
        # Waits for all of them: if one cannot write its result, the nine others must not be left running.
        ended = await asyncio.gather(*(self._look(link) for link in taken), return_exceptions=True)
        for trouble in ended:
            if trouble is not None:
                raise trouble
        return len(taken)

    async def _look(self, link: Link) -> None:
        try:
            if not await self._is_back(link):
                await self._links.probe_failed(link.server_url)
        except SQLAlchemyError:
            raise
        except Exception as error:  # a bug must not keep nine others from being probed
            log.error("link_probe_crashed", server_url=link.server_url, **crash(error))

    async def _is_back(self, link: Link) -> bool:
        """Tell whether the link is up now, or need not be probed any more."""
        url = link.server_url
        if link.operator_hold or await self._registry.is_blacklisted(url):
            return False
        if link.state is LinkState.REFUSING:
            await self._send_canary(url)
            return False
        server = await self._registry.find(url)
        if not await (self._can_be_discovered(url) if server is None else self._answers(link, server)):
            return False
        if link.needs_canary and await self._send_canary(url):
            return False
        return (await self._links.returned(url, reason="probe")).state is LinkState.UP

    async def _answers(self, link: Link, server: KnownServer) -> bool:
        seen = await self._probe.look(server)
        if seen.another_key:
            await self._links.mismatched(server.url)
            return False
        # For other reasons, such as a status, the policy would return what applies to unknown failures.
        is_network = link.reason in set(NetworkErrorCode)
        if not seen.well and is_network and get_threat_policy(link.reason).relay_eligible:
            await self._send_canary(server.url)
        return seen.well

    async def _can_be_discovered(self, url: str) -> bool:
        try:
            await self._discover(url)
        except (DiscoveryError, OutboundError) as error:
            log.info("link_probe", server_url=url, problem=str(error))
            return False
        return True
