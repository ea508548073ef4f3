"""Looks at servers whose links are not up, so that what is held for them goes out soon after they return.

Theory of operation. The link says when its next look is due, and a look begins with moving that date, if it is still
the same. So only one of all processes looks, and a process that dies meanwhile costs half a minute. Recovery is proved
by the way that failed: where something is held, the look is a canary, one delivery that is sent ahead, and what becomes
of it is noted by its attempt. Where nothing is held, the wire is asked, if it knows a way without a delivery. So is one
that did not seem to be who it was, and only so: an acknowledgment does not prove that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db import DEFAULT_WIRE, LinkState
from federation.base.logs import crash
from federation.servers.blacklist import Blacklist
from federation.servers.link_rules import Link
from federation.servers.links import Links

log = structlog.get_logger(__name__)

AT_ONCE: Final = 10

SendCanary = Callable[[str, str], Awaitable[bool]]
"""Sends one held delivery ahead to the server, by the wire; returns False if none is held for it."""
IsWell = Callable[[Link], Awaitable[bool | None]]
"""Asks the server by its wire whether it is back; None if only a delivery can tell."""
NewlyHeld = Callable[[], Awaitable[Sequence[tuple[str, str]]]]
"""Returns servers and wires for which something is held by now, and nothing was at the last look."""


class LinkProbes:
    """Looks at the servers that are due, ten at a time, by the wires that this node has."""

    def __init__(
        self,
        *,
        links: Links,
        blacklist: Blacklist,
        is_well: IsWell,
        send_canary: SendCanary,
        newly_held: NewlyHeld,
        wires: tuple[str, ...] = (DEFAULT_WIRE,),
    ) -> None:
        self._links = links
        self._blacklist = blacklist
        self._is_well = is_well
        self._send_canary = send_canary
        self._newly_held = newly_held
        self._wires = wires

    async def tick(self) -> int:
        """Look at the servers that are due. Return how many there were.

        Raises:
            SQLAlchemyError: the database did not answer; they are due again in half a minute.
        """
        for url, wire in await self._newly_held():
            await self._links.of(wire).look_soon(url)
        due = await self._links.due_for_probe(AT_ONCE, self._wires)
        taken = [link for link in due if await self._links.take_probe(link)]
        # Waits for all of them: if one cannot write its result, the nine others must not be left running.
        ended = await asyncio.gather(*(self.look(link) for link in taken), return_exceptions=True)
        for trouble in ended:
            if trouble is not None:
                raise trouble
        return len(taken)

    async def look(self, link: Link) -> None:
        """Find out whether the server is back, and note it in its link, unless a canary is left to do so.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        url, links = link.server_url, self._links.of(link.wire)
        try:
            if link.operator_hold or await self._blacklist.covering(url) is not None:
                await links.probe_failed(url)
            elif link.state is LinkState.MISMATCH or not await self._send_canary(url, link.wire):
                await self._ask_whether_back(link)
        except SQLAlchemyError:
            raise
        except Exception as error:  # a bug must not keep nine others from being looked at
            log.error("link_probe_crashed", server_url=url, wire=link.wire, **crash(error))

    async def _ask_whether_back(self, link: Link) -> None:
        """Ask by the wire. A server that refuses deliveries may answer there as ever: only a canary can tell."""
        url, links = link.server_url, self._links.of(link.wire)
        if link.state is not LinkState.REFUSING and await self._is_well(link):
            await links.returned(url, reason="probe")
        else:
            await links.probe_failed(url)
