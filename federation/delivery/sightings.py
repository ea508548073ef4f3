"""What a process notices of others: jobs of another node, this node's queues in another place, proxies nobody named.

Theory of operation. Each of these is a wrong setting, and deliveries wait until somebody mends it. So each is logged,
at most once a minute for each origin or place, and written to the database, where doctor and other processes find it.
The amount that is written is bounded, because the values of jobs may come from a stranger.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from typing import Final

import structlog
from sqlalchemy import Connection, Executable, bindparam, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from db import Database, QueueSighting, SightingKind
from federation.base.meter import NO_METER, Meter
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(minutes=1)
"""The time between two looks, and between two log lines about the same thing."""
RECENT: Final = timedelta(minutes=5)
KEPT: Final = timedelta(days=1)
MOST_ORIGINS: Final = 20
ADVICE: Final = "two databases use one queue: give one of them another queue, or another FEDERATION_QUEUE_PREFIX"
PLACES_ADVICE: Final = "give all processes of the node the same QUEUE_URL, REDIS_URL and FEDERATION_QUEUE_PREFIX"

_TABLE: Final = QueueSighting.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_ALL: Final = select(_TABLE).order_by(_TABLE.c.seen_at)
_OLD: Final = delete(_TABLE).where(_TABLE.c.seen_at < bindparam("before"))


class Sightings:
    """The sightings of one process, whose queues are at `place`."""

    def __init__(self, database: Database, place: str, *, meter: Meter = NO_METER, clock: Clock | None = None) -> None:
        self._database = database
        self.place = place
        self._meter = meter
        self._clock = clock or SystemClock()
        self._strangers: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    def stranger(self, name: str, ours: str, *, delivery_id: str, pause: timedelta) -> None:
        """Note that a job of another node, of that name, was in our queue, and went back for a while."""
        self._meter.stranger()
        if name not in self._strangers and len(self._strangers) >= MOST_ORIGINS:
            name = "others"
        self._strangers[name] += 1
        if self._is_due(name):
            log.error(
                "job_of_another_node",
                delivery_id=delivery_id,
                theirs=name,
                ours=ours,
                queues=self.place,
                given_back_for=f"{pause.total_seconds():g} s",
                advice=ADVICE,
            )

    async def tick(self) -> None:
        """Write what was seen to the database, and log other places of our queues.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        strangers, self._strangers = self._strangers, Counter()
        now = self._clock.now()
        seen = [(SightingKind.PLACE, self.place), *((SightingKind.STRANGER, name) for name in strangers)]
        await self._database.transact(lambda connection: _write(connection, seen, now))
        for place in await places(self._database, now):
            if place != self.place and self._is_due(place):
                log.error("queues_in_two_places", here=self.place, there=place, advice=PLACES_ADVICE)

    def _is_due(self, about: str) -> bool:
        """Tell whether there has been no line about it for a while. If so, the caller has to write one."""
        now = monotonic()
        if now - self._told.get(about, -math.inf) < INTERVAL.total_seconds():
            return False
        if len(self._told) > 2 * MOST_ORIGINS:
            self._told.clear()
        self._told[about] = now
        return True


async def places(database: Database, now: datetime) -> list[str]:
    """Return where the processes of this node that ran in the last minutes have their queues."""
    return await _recent(database, SightingKind.PLACE, now - RECENT)


async def strangers(database: Database, now: datetime) -> list[str]:
    """Return whose jobs were found in our queues in the last two hours, which is longer than such a job is left."""
    return await _recent(database, SightingKind.STRANGER, now - timedelta(hours=2))


async def proxies(database: Database, now: datetime) -> list[str]:
    """Return the addresses of proxies that the settings did not name, as seen in the last day."""
    return await _recent(database, SightingKind.PROXY, now - KEPT)


async def note_proxy(database: Database, address: str, now: datetime) -> None:
    """Note that a proxy connects from *address*: it passes on what others ask.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    await database.transact(lambda connection: _write(connection, [(SightingKind.PROXY, address)], now))


def naming(named: Iterable[object], more: Iterable[object]) -> str:
    """Return the line of the settings that names those proxies, and *more*."""
    return f"FEDERATION_TRUSTED_PROXIES={','.join(map(str, (*named, *more)))}"


async def _recent(database: Database, kind: SightingKind, since: datetime) -> list[str]:
    return [row.what for row in await database.rows(_ALL) if row.kind is kind and row.seen_at >= since]


def _write(connection: Connection, seen: list[tuple[SightingKind, str]], now: datetime) -> None:
    connection.execute(_OLD, {"before": now - KEPT})
    rows = [{"kind": kind, "what": what, "seen_at": now} for kind, what in sorted(seen)]
    connection.execute(_upsert(connection.dialect.name), rows)


@cache
def _upsert(dialect: str) -> Executable:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(_TABLE)
    upsert: Executable = insert.on_conflict_do_update(
        index_elements=[_TABLE.c.kind, _TABLE.c.what], set_={"seen_at": insert.excluded.seen_at}
    )
    return upsert


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
