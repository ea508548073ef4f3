"""The time that several processes share: the database's, where it has a server with a clock of its own.

Theory of operation. Links, holds, expiry and recurring jobs compare times that several processes write, and a machine's
clock may be hours off. On PostgreSQL each process asks the server for its time once a minute, and counts on from there
by the event loop's clock, which nobody can set. On SQLite the database has no clock but the machine's, which all of its
processes share. Both times are written down each minute, so that doctor can compare the clocks of all processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

from sqlalchemy import Connection, Executable, bindparam, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from db import Database, ProcessClock
from workers.clock import Clock, SystemClock

INTERVAL: Final = timedelta(minutes=1)
"""The time between two looks at the database's clock: quartz drifts by milliseconds in it."""
KEPT: Final = timedelta(days=1)
AGAIN: Final = timedelta(seconds=1)
SLOWEST_ANSWER: Final = timedelta(seconds=2)
"""An answer that took longer tells the time too badly, unless nothing better is known."""

_TABLE: Final = ProcessClock.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_OLD: Final = delete(_TABLE).where(_TABLE.c.database_at < bindparam("before"))
_NOW: Final = select(func.clock_timestamp())


def is_alive(process: str) -> bool:
    """Tell whether a process that wrote down its time is there still; one of another host counts as such."""
    host, _, pid = process.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _elapsed() -> float:
    """Return the seconds on the event loop's clock, which a thread without one reads by itself."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class DatabaseClock:
    """The database's clock, as this process knows it. `machine` is the clock of the machine."""

    def __init__(self, database: Database, machine: Clock | None = None) -> None:
        self._database = database
        self._machine = machine or SystemClock()
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._measured: tuple[datetime, float] | None = None
        self._is_machine = not database.has_clock

    @property
    def is_known(self) -> bool:
        """Whether the time is the database's; until then it is the machine's."""
        return self._is_machine or self._measured is not None

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""
        if self._measured is None:
            return self._machine.now()
        at, elapsed = self._measured
        return at + timedelta(seconds=_elapsed() - elapsed)

    async def ensure(self) -> None:
        """Ask the database for its time, unless it was asked before.

        Raises:
            SQLAlchemyError: it did not answer.
        """
        if not self.is_known:
            await self.measure()

    async def known(self) -> None:
        """Return once the time is the database's, however long that does not answer."""
        while not self.is_known:
            try:
                await self.measure()
            except SQLAlchemyError:
                await asyncio.sleep(AGAIN.total_seconds())

    def measure_on(self, connection: Connection) -> None:
        """Ask the database in the caller's transaction, unless it was asked within the last minute."""
        elapsed = _elapsed()
        is_fresh = self._measured is not None and elapsed - self._measured[1] < INTERVAL.total_seconds()
        if self._is_machine or is_fresh or connection.dialect.name != "postgresql":
            return
        self._note(connection.execute(_NOW).scalar_one(), elapsed)

    async def tick(self) -> None:
        """Ask the database for its time, and write it down beside the machine's.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        await self.measure()
        now = self.now()
        values = {"process": self._process, "machine_at": self._machine.now(), "database_at": now}

        def write(connection: Connection) -> None:
            connection.execute(_OLD, {"before": now - KEPT})
            connection.execute(_upsert(connection.dialect.name), values)

        await self._database.transact(write)

    async def measure(self) -> None:
        """Ask the database for its time, if it has one of its own.

        Raises:
            SQLAlchemyError: it did not answer.
        """
        if not self._is_machine:
            elapsed = _elapsed()
            self._note(await self._database.time(), elapsed)

    def _note(self, told: datetime, before: float) -> None:
        took = _elapsed() - before
        if self._measured is None or took <= SLOWEST_ANSWER.total_seconds():
            self._measured = told.astimezone(UTC), before + took / 2


@cache
def _upsert(dialect: str) -> Executable:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(_TABLE)
    told = {name: insert.excluded[name] for name in ("machine_at", "database_at")}
    upsert: Executable = insert.on_conflict_do_update(index_elements=[_TABLE.c.process], set_=told)
    return upsert
