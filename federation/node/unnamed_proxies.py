"""Proxies in front of this node that its settings do not name: logged once, and written down for the doctor.

Clients behind them are not limited by address until the proxies are named, and nothing else would show that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db import Database
from federation.delivery.sightings import naming, note_proxy
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

MOST: Final = 20
"""A limit, so that a neighbour with many addresses fills neither log nor table."""
AGAIN: Final = timedelta(hours=1)
"""How often a proxy that is still there is written down once more."""


class UnnamedProxies:
    """Callable with the address of a proxy that is not among *named*; returns at once."""

    def __init__(
        self, database: Database, *, named: Collection[IPv4Network | IPv6Network], clock: Clock | None = None
    ) -> None:
        self._database = database
        self._named = named
        self._clock = clock or SystemClock()
        self._noted: dict[str, float] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, address: str) -> None:
        now = monotonic()
        if now - self._noted.get(address, -math.inf) < AGAIN.total_seconds():
            return
        if address not in self._noted:
            if len(self._noted) >= MOST:
                return
            log.warning("proxy_not_named", address=address, setting=naming(self._named, [address]))
        self._noted[address] = now
        task = asyncio.get_running_loop().create_task(self._write(address), name="unnamed-proxy")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def close(self) -> None:
        """Wait until everything is written."""
        await asyncio.gather(*self._writing)

    async def _write(self, address: str) -> None:
        with suppress(SQLAlchemyError):  # the log has it already
            await note_proxy(self._database, address, self._clock.now())
