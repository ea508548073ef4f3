"""When what is owed was last swept, and what follows from a gap: whether the clock can be believed, and the queue.

A machine's clock may be set a week ahead, and everything that is held would be too old at once. So after a gap of more
than an hour between two sweeps nothing expires or is purged for a day of sweeping, in which somebody may notice. A node
that was switched off as long looks the same, and waits as well. The rules are functions of values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cache
from typing import Final

import structlog
from sqlalchemy import Connection, Executable, select
from sqlalchemy.dialects import postgresql, sqlite

from db import Database, Sweep

log = structlog.get_logger(__name__)

GAP: Final = timedelta(hours=1)
"""Two sweeps that are further apart than this leave open what happened to the clock in between."""
SPARED: Final = timedelta(hours=24)
"""For how long of sweeping nothing expires then."""
LOST_INTERVAL: Final = timedelta(minutes=1)
"""A queue is believed to have lost its data at most this often."""
_ID: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSweep:
    """The last sweep: for how many more seconds of sweeping nothing expires, and when the queue last lost its data."""

    swept_at: datetime
    spares_seconds: float = 0.0
    queue_lost_at: datetime | None = None

    def spares(self, now: datetime) -> bool:
        """Tell whether nothing may be given up or deleted by its age at `now`, as that may be a wrong clock's."""
        return self.spares_seconds > 0 or now - self.swept_at > GAP


def after_sweep(last: LastSweep | None, now: datetime) -> LastSweep:
    """Return what is known once a sweep has begun at `now`.

    A gap begins a time in which nothing expires. Another one, within that, neither counts nor begins it anew. A clock
    that was set back only begins again from where it is.
    """
    if last is None:
        return LastSweep(swept_at=now)
    gap = now - last.swept_at
    left = last.spares_seconds
    if gap > GAP:
        left = left or SPARED.total_seconds()
    elif gap > timedelta(0):
        left = max(left - gap.total_seconds(), 0.0)
    return replace(last, swept_at=now, spares_seconds=left)


def after_loss(last: LastSweep | None, now: datetime) -> LastSweep:
    """Return what is known once the queue seems to have lost its data, unless that was noted a moment ago."""
    last = last or LastSweep(swept_at=now)
    noted = last.queue_lost_at
    is_recent = noted is not None and noted <= now < noted + LOST_INTERVAL
    return last if is_recent else replace(last, queue_lost_at=now)


class Sweeps:
    """Reads and writes the one row of `sweeps`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, now: datetime) -> LastSweep:
        """Note that a sweep begins. Return what is known now.

        Raises:
            SQLAlchemyError: the database did not answer.
        """

        def begin(connection: Connection) -> tuple[LastSweep | None, LastSweep]:
            last = _read(connection)
            swept = after_sweep(last, now)
            _write(connection, swept)
            return last, swept

        last, swept = await self._database.transact(begin)
        if last is not None and swept.spares_seconds > last.spares_seconds:
            log.warning(
                "sweep_after_a_gap",
                last_sweep_at=last.swept_at.isoformat(),
                then=f"nothing expires or is purged for {SPARED / timedelta(hours=1):g} h of sweeping",
                advice="is this machine's clock right? If it is, `federation deliveries expire` ends this",
            )
        return swept

    async def last(self) -> LastSweep | None:
        """Return what is known; None if nothing was swept yet."""
        found = await self._database.rows(_ONE)
        return LastSweep(**found[0]._mapping) if found else None

    async def note_lost_queue(self, now: datetime) -> bool:
        """Note that the queue seems to have lost its data, at most once a minute. Return whether it was noted."""

        def note(connection: Connection) -> bool:
            last = _read(connection)
            noted = after_loss(last, now)
            if noted != last:
                _write(connection, noted)
            return noted != last

        return await self._database.transact(note)

    async def believe(self, now: datetime) -> None:
        """Let things expire again from now on: an operator says that the clock is right."""

        def believe(connection: Connection) -> None:
            _write(connection, replace(_read(connection) or LastSweep(swept_at=now), swept_at=now, spares_seconds=0.0))

        await self._database.transact(believe)


_TABLE: Final = Sweep.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_COLUMNS: Final = tuple(field.name for field in fields(LastSweep))
_ONE: Final = select(*(_TABLE.c[name] for name in _COLUMNS)).where(_TABLE.c.id == _ID)


def _read(connection: Connection) -> LastSweep | None:
    row = connection.execute(_ONE.with_for_update()).one_or_none()
    return None if row is None else LastSweep(**row._mapping)


def _write(connection: Connection, swept: LastSweep) -> None:
    values = {name: getattr(swept, name) for name in _COLUMNS}
    connection.execute(_upsert(connection.dialect.name), {"id": _ID, **values})


@cache
def _upsert(dialect: str) -> Executable:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(_TABLE)
    upsert: Executable = insert.on_conflict_do_update(
        index_elements=[_TABLE.c.id], set_={name: insert.excluded[name] for name in _COLUMNS}
    )
    return upsert
