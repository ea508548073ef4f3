"""Sending what is held for a server that is up again: gently, the oldest first, the servers in turn.

Theory of operation. A link that comes up says when its first held deliveries go out. Each batch is one transaction: it
locks the link, makes as many rows ready as the rate says, and sets when the next batch goes out, at twice the rate. So
any process may send any batch, none is sent twice, and a process that dies in between costs nothing but the jobs of one
batch, which the outbox sweeper adds. If there was not room enough for a whole batch, the next one follows sooner in the
same proportion; if a batch went out late, the next one is on time, so that the rate is kept. What is released and not
yet tried is counted over all servers: a thousand that come back together are served like one. A failure takes the link
down, and cancels its next batch. Of a wire that this node does not have nothing is released or counted: nobody would
try it, so it would take up room for good.

A canary is one delivery that is released ahead of the others, to a server of which a probe cannot tell whether it is
well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import Connection, Select, bindparam, func, literal_column, or_, select, union_all, update

from db import DEFAULT_WIRE, Database, DeliveryState, HoldReason, among
from federation.base.meter import NO_METER, Meter
from federation.delivery.held.sweeper import WAITS_FOR_SERVER
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.rows import TABLE, OwedRow, made_ready
from federation.servers.link_rules import Link
from federation.servers.links import Links, locked, store
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(seconds=1)
LOOKS: Final = timedelta(seconds=0.25)
"""The time between two calls of `Releaser.tick`: there may be room for less than what a second releases."""
SERVERS_AT_ONCE: Final = 50


class Releaser:
    """Releases held deliveries at 1, 2, 4 ... `rate` per second and server, while fewer than `most_waiting` wait."""

    def __init__(
        self,
        database: Database,
        queues: DeliveryQueues,
        *,
        links: Links,
        wires: tuple[str, ...] = (DEFAULT_WIRE,),
        rate: int,
        most_waiting: int,
        meter: Meter = NO_METER,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._queues = queues
        self._links = links
        self._wires = wires
        self._rate = rate
        self._most_waiting = most_waiting
        self._meter = meter
        self._clock = clock or SystemClock()

    async def tick(self) -> int:
        """Release the next batch of every server whose turn it is, as far as there is room. Return how many went out.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue did not answer; nothing is lost by that.
        """
        due = await self._links.due_for_release(SERVERS_AT_ONCE, self._wires)
        if not due:
            return 0
        await self._queues.start()
        room = self._most_waiting - await self._waiting()
        released = 0
        for link in due:
            if released >= room:
                break
            released += await self._release(link, room - released)
        return released

    async def send_canary(self, server_url: str, wire: str = DEFAULT_WIRE) -> bool:
        """Send one held delivery ahead to the server, by that wire.

        Return False if none is held for it; one already on its way counts.

        Chooses the oldest that was not sent ahead since the link went down; once all were, the one that waited longest.
        """
        await self._queues.start()
        now = self._clock.now()

        def choose(connection: Connection) -> tuple[bool, list[OwedRow]]:
            link = locked(connection, server_url, now, wire=wire)
            if connection.execute(_CANARY_UNDER_WAY, _way(link)).first() is not None:
                return True, []
            chosen = _canary(connection, link)
            rows = made_ready(connection, [chosen], now) if chosen is not None else []
            if rows:
                connection.execute(_MARKED, {"row": chosen, "at": now})
            return bool(rows), rows

        sent, rows = await self._database.transact(choose)
        if rows:
            await self._queues.add_bulk([row.job() for row in rows])
            self._meter.released(len(rows))
            log.info("canary_sent", server_url=server_url, wire=wire, delivery_id=rows[0].id)
        return sent

    async def _waiting(self) -> int:
        found = await self._database.rows(_WAITING, {"wires": self._wires})
        return int(found[0][0])

    async def _release(self, seen: Link, room: int) -> int:
        now = self._clock.now()

        def release(connection: Connection) -> tuple[Link, Sequence[OwedRow]]:
            link = locked(connection, seen.server_url, now, wire=seen.wire)
            if link.release_at != seen.release_at or not link.is_open:
                return link, []
            if link.rest_until is not None and link.hold(now) is not None:
                store(connection, replace(link, release_at=link.rest_until))
                return link, []
            limit = min(_batch(link), room)
            chosen = connection.execute(_OLDEST, {**_way(link), "most": limit}).scalars().all()
            rows = made_ready(connection, chosen, now)
            link = self._after_batch(link, now, count=len(rows), limit=limit)
            store(connection, link)
            return link, rows

        link, rows = await self._database.transact(release)
        self._links.of(seen.wire).forget(seen.server_url)
        if rows:
            await self._queues.add_bulk([row.job() for row in rows])
            self._meter.released(len(rows))
        if link.release_at is None and seen.release_at is not None and link.is_open:
            log.info("release_ended", server_url=link.server_url, wire=link.wire)
        return len(rows)

    def _after_batch(self, link: Link, now: datetime, *, count: int, limit: int) -> Link:
        if count < limit:
            return replace(link, release_at=None, release_rate=1.0, release_start=1.0)
        part = limit / _batch(link)
        interval = max(INTERVAL, INTERVAL / link.release_rate) * part
        rate = min(link.release_rate * 2**part, float(self._rate))
        return replace(link, release_at=max(min(link.release_at or now, now) + interval, now), release_rate=rate)


def _canary(connection: Connection, link: Link) -> str | None:
    values = {**_way(link), "since": link.since}
    untried = connection.execute(_OLDEST_UNTRIED, values).scalar_one_or_none()
    return untried or connection.execute(_TRIED_LONGEST_AGO, values).scalar_one_or_none()


def _way(link: Link) -> dict[str, object]:
    return {"server": link.server_url, "by": link.wire}


def _batch(link: Link) -> int:
    """Return how many deliveries go out at once, where there is room."""
    return max(int(link.release_rate), 1)


# Includes deliveries that found no room to wait: they are released in any case, but their time may be minutes off.
_RELEASED: Final = (*WAITS_FOR_SERVER, HoldReason.BUSY)
_BY_WAY = (TABLE.c.server_url == bindparam("server"), TABLE.c.wire == bindparam("by"))
_IS_HELD = TABLE.c.state == literal_column(f"'{DeliveryState.HELD}'")  # a literal, as in the index


def _held(reason: HoldReason) -> Select[tuple[str, datetime]]:
    """Select what of a server's deliveries by a wire is held for this reason; an index of its own has the oldest first.

    Among a million that are held, sorting or passing over others would hold up every other writer for seconds.
    """
    return select(TABLE.c.id, TABLE.c.created_at).where(*_BY_WAY, _IS_HELD, TABLE.c.held_reason == reason)


def _oldest(reason: HoldReason) -> Select[tuple[str, datetime]]:
    return select(_held(reason).order_by(TABLE.c.created_at).limit(bindparam("most")).subquery())


_CANDIDATES = union_all(*(_oldest(reason) for reason in _RELEASED)).subquery()
_OLDEST = select(_CANDIDATES.c.id).order_by(_CANDIDATES.c.created_at).limit(bindparam("most"))
_WAITING = (
    select(func.count())
    .select_from(TABLE)
    .where(TABLE.c.released_at.is_not(None), TABLE.c.state == DeliveryState.READY, among(TABLE.c.wire, "wires"))
)
_WAITING_FOR_SERVER = _held(HoldReason.SERVER).with_only_columns(TABLE.c.id)
_OLDEST_UNTRIED = (
    _WAITING_FOR_SERVER.where(or_(TABLE.c.canary_at.is_(None), TABLE.c.canary_at < bindparam("since")))
    .order_by(TABLE.c.created_at)
    .limit(1)
)
_TRIED_LONGEST_AGO = _WAITING_FOR_SERVER.order_by(TABLE.c.canary_at, TABLE.c.created_at).limit(1)
_CANARY_UNDER_WAY = (
    select(TABLE.c.id)
    .where(
        *_BY_WAY,
        TABLE.c.state == DeliveryState.READY,
        or_(TABLE.c.released_at == TABLE.c.canary_at, TABLE.c.sending.is_not(None)),
        TABLE.c.canary_at.is_not(None),
    )
    .limit(1)
)
_MARKED = update(TABLE).where(TABLE.c.id == bindparam("row")).values(canary_at=bindparam("at"))
