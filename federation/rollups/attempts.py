"""Attempts by minute: how many ended in which way, and how long they took.

Theory of operation. Deliveries pay nothing for these numbers: a recurring job reads the attempt log behind the last
number that was counted, adds it up in the database, and writes a few rows. The new position is part of the transaction
that adds the counts, and of no other that began at the same position. So nothing is counted twice, whoever is killed or
runs at the same time.

On PostgreSQL a lower number may become visible after a higher one (see `admin/attempt_feed`). A count covers the log up
to a number once no transaction is open any more that had begun when that number was the highest; which are open, the
server's snapshots tell. While one stays open for long, the count waits: it is late then, and still complete. A
transaction takes its number a moment before the server counts it as begun, hence the pause before the first look.

An attempt that was recorded as stalled, and ended after all, was counted as stalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Select, bindparam, case, delete, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError
from sqlmodel import col

from db import AttemptMinute, AttemptOutcome, Database, DeliveryAttempt, RollupPosition
from workers.clock import Clock, SystemClock, monotonic

BOUNDS_MS: Final = (
    *(1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700),
    *(1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 30_000),
)
"""An attempt belongs to the first bound that it does not exceed; one more number counts those that exceed all."""

KEEP: Final = timedelta(days=7)
FIRST: Final = timedelta(hours=1)
"""How far back the first count of a node goes."""
PAGE: Final = 20_000
PAUSE: Final = timedelta(milliseconds=500)
LONGEST_WAIT: Final = timedelta(seconds=3)
"""For transactions to end; what has not ended by then is left to the next run."""
NAME: Final = "attempts"

_Key: TypeAlias = tuple[datetime, AttemptOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    position: int
    upto: int | None
    horizon: int | None


class AttemptMinutes:
    """Brings `attempt_minutes` up to date. Processes that do it at once do no harm."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def __call__(self) -> int:
        """Count what was added to the log. Return how many attempts that were.

        Raises:
            SQLAlchemyError: the database failed; what was counted by then is.
        """
        place = await self._position()
        upto = await self._settled(place)
        if upto is None:
            return 0
        total, position = 0, place.position
        while position < upto:
            end = min(position + PAGE, upto)
            counts = await self._counts(position, end)
            now = self._clock.now()
            if not await self._database.transact(_Addition(counts, position, end, now)):
                break  # somebody else has counted these
            total += sum(sum(each) for each in counts.values())
            position = end
        return total

    async def _position(self) -> _Position:
        while not (found := await self._database.rows(_POSITION)):
            [(first,)] = await self._database.rows(_FIRST_SINCE, {"since": self._clock.now() - FIRST})
            [(newest,)] = await self._database.rows(_NEWEST)
            begin = (newest or 0) if first is None else first - 1
            with suppress(IntegrityError):  # which says that another process was faster
                await self._database.transact(partial(_insert_position, begin=begin))
        [row] = found
        return _Position(position=row.position, upto=row.upto, horizon=row.horizon)

    async def _settled(self, place: _Position) -> int | None:
        """Return up to which number everything is visible that ever will be, or None if nothing new is."""
        [(newest,)] = await self._database.rows(_NEWEST)
        if (newest or 0) < place.position:  # the log was emptied, and on SQLite begins with 1 again
            await self._database.transact(lambda connection: connection.execute(_EMPTIED, {"was": place.position}))
            return None
        if newest is None or newest == place.position:
            return None
        return int(newest) if self._database.is_sqlite else await self._settled_on_postgres(place, newest)

    async def _settled_on_postgres(self, place: _Position, newest: int) -> int | None:
        [(oldest_open, next_open)] = await self._database.rows(_OPEN)
        upto, horizon = place.upto, place.horizon
        if upto is not None and horizon is not None and upto > place.position and horizon <= next_open:
            if oldest_open >= horizon:
                return upto
        else:  # a horizon of the future is that of another server, from which the database was moved
            upto, horizon = newest, int(next_open)
        deadline = monotonic() + LONGEST_WAIT.total_seconds()
        while monotonic() < deadline:
            await asyncio.sleep(PAUSE.total_seconds())
            [(oldest_open, _)] = await self._database.rows(_OPEN)
            if oldest_open >= horizon:
                return upto
        kept = {"was": place.position, "number": upto, "before": horizon}
        await self._database.transact(lambda connection: connection.execute(_WAITING, kept))
        return None

    async def _counts(self, position: int, end: int) -> Mapping[_Key, list[int]]:
        counts: dict[_Key, list[int]] = {}
        query = _counting(sqlite=self._database.is_sqlite)
        for minute, outcome, bucket, number in await self._database.rows(query, {"after": position, "until": end}):
            at = datetime.fromisoformat(minute) if isinstance(minute, str) else minute
            counts.setdefault((at.replace(tzinfo=UTC), outcome), [0] * (len(BOUNDS_MS) + 1))[bucket] += number
        return counts


@dataclass(frozen=True, slots=True)
class _Addition:
    """Adds counts to the minutes, if the position is still the one that they were counted from."""

    counts: Mapping[_Key, Sequence[int]]
    position: int
    end: int
    now: datetime

    def __call__(self, connection: Connection) -> bool:
        moved = connection.execute(_MOVED, {"was": self.position, "becomes": self.end})
        if moved.rowcount != 1:
            return False
        known = {
            (row.minute, row.outcome): row.latencies
            for row in connection.execute(_KNOWN, {"minutes": list({minute for minute, _ in self.counts})})
        }
        rows = [(key, _sum(known.get(key), counted)) for key, counted in self.counts.items()]
        changed = [_row(key, latencies) for key, latencies in rows if key in known]
        new = [_row(key, latencies) for key, latencies in rows if key not in known]
        if changed:
            connection.execute(_CHANGED, changed)
        if new:
            values = [{name.removeprefix("new_"): value for name, value in row.items()} for row in new]
            connection.execute(insert(_MINUTES), values)
        connection.execute(_OLD, {"before": self.now - KEEP})
        return True


def _sum(known: Sequence[int] | None, counted: Sequence[int]) -> list[int]:
    """Add the counts up; those of a version with other bounds are replaced."""
    if known is None or len(known) != len(counted):
        return list(counted)
    return [one + other for one, other in zip(known, counted, strict=True)]


def _row(key: _Key, latencies: Sequence[int]) -> dict[str, object]:
    return {"new_minute": key[0], "new_outcome": key[1], "new_attempts": sum(latencies), "new_latencies": latencies}


def _insert_position(connection: Connection, *, begin: int) -> None:
    connection.execute(insert(_POSITIONS), {"name": NAME, "position": begin})


def _counting(*, sqlite: bool) -> Select[*tuple[Any, ...]]:
    began = col(DeliveryAttempt.started_at)
    minute = func.substr(began, 1, 16) if sqlite else func.date_trunc("minute", began)
    # Grouped by names: expressions with parameters would be different ones to PostgreSQL.
    return (
        select(minute.label("minute"), col(DeliveryAttempt.outcome), _BUCKET.label("bucket"), func.count())
        .where(bindparam("after") < _ID, bindparam("until") >= _ID)
        .group_by("minute", col(DeliveryAttempt.outcome), "bucket")
    )


_ID = col(DeliveryAttempt.id)
_BUCKET = case(
    *((col(DeliveryAttempt.duration_ms) <= bound, literal(index)) for index, bound in enumerate(BOUNDS_MS)),
    else_=literal(len(BOUNDS_MS)),
)
_NEWEST: Final = select(func.max(_ID))
_FIRST_SINCE: Final = select(func.min(_ID)).where(col(DeliveryAttempt.started_at) >= bindparam("since"))
# Of PostgreSQL: no transaction below the first is open, and all that have begun are below the second.
_OPEN: Final = select(
    func.txid_snapshot_xmin(func.txid_current_snapshot()), func.txid_snapshot_xmax(func.txid_current_snapshot())
)
_POSITIONS: Final = RollupPosition.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_MINE: Final = _POSITIONS.c.name == NAME
_AT: Final = _POSITIONS.c.position == bindparam("was")
_POSITION: Final = select(_POSITIONS).where(_MINE)
_MOVED: Final = update(_POSITIONS).where(_MINE, _AT).values(position=bindparam("becomes"), upto=None, horizon=None)
_WAITING: Final = update(_POSITIONS).where(_MINE, _AT).values(upto=bindparam("number"), horizon=bindparam("before"))
_EMPTIED: Final = update(_POSITIONS).where(_MINE, _AT).values(position=0, upto=None, horizon=None)
_MINUTES: Final = AttemptMinute.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_KNOWN: Final = select(_MINUTES).where(_MINUTES.c.minute.in_(bindparam("minutes", expanding=True)))
_CHANGED: Final = (
    update(_MINUTES)
    .where(_MINUTES.c.minute == bindparam("new_minute"), _MINUTES.c.outcome == bindparam("new_outcome"))
    .values(attempts=bindparam("new_attempts"), latencies=bindparam("new_latencies"))
)
_OLD: Final = delete(_MINUTES).where(_MINUTES.c.minute < bindparam("before"))
