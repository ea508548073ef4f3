"""Attempts as they end: one reader of the attempt log, for everybody who watches.

Theory of operation. The log's rows are numbered, so the reader asks for what lies behind the last number that it saw,
by the primary key: a few times a second, at most `PAGE` rows, and nothing while nobody watches. Writers pay nothing for
it.

On SQLite one transaction writes at a time, and takes its numbers while it does: numbers become visible in their order.
On PostgreSQL a number is taken from a sequence before the commit, so a lower number may become visible after a higher
one. The reader therefore remembers the numbers that it has skipped, and asks for them as well, by the same key. Some
never appear, because their transaction was undone, or updated a row instead. A number is given up once every
transaction has ended that had begun when the number was skipped, as the server's snapshots tell: whoever took the
number was one of them. A transaction takes the number a moment before the server counts it as begun, hence
`LEAST_WAIT`.

An attempt that was recorded as stalled, and ended after all, keeps its number: it is shown once, as stalled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import Database, DeliveryAttempt
from federation.admin.attempts import LoggedAttempt, logged_attempt, logged_attempts
from workers.clock import monotonic

PAGE: Final = 500
"""The most attempts that one look reads; further ones follow at once."""
MAX_SKIPPED: Final = 2_000
"""How many skipped numbers are remembered; of more, the highest."""
MAX_WAITING: Final = 2_000
"""How many attempts wait for a watcher that does not take them; of more, the latest."""
LEAST_WAIT: Final = timedelta(seconds=5)
SHORTEST_PAUSE: Final = timedelta(milliseconds=200)
LONGEST_PAUSE: Final = timedelta(seconds=1)
GROWTH: Final = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Skipped:
    """When a number was skipped: by this process's clock, and before which transaction."""

    at: float
    before: int


class AttemptReader:
    """Reads the log from `start` on. Each attempt is returned once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last = 0
        self._skipped: dict[int, _Skipped] = {}

    async def start(self) -> None:
        """Begin behind the newest attempt."""
        [(newest,)] = await self._database.rows(_NEWEST)
        self._last = newest or 0

    async def read(self) -> tuple[list[LoggedAttempt], bool]:
        """Return what has become visible, in the order of numbers, and whether there may be more at once.

        Raises:
            SQLAlchemyError: the database did not answer; nothing is lost by that.
        """
        late = [] if self._database.is_sqlite else await self._late()
        rows = await self._database.rows(_NEXT, {"last": self._last})
        if rows:
            if not self._database.is_sqlite:
                await self._skip([row.id for row in rows])
            self._last = rows[-1].id
        elif self._database.is_sqlite:
            await self._begin_anew()
        return [*late, *map(logged_attempt, rows)], len(rows) == PAGE

    async def _late(self) -> list[LoggedAttempt]:
        """Return the attempts whose numbers were skipped and have appeared; forget those that cannot appear."""
        if not self._skipped:
            return []
        [(oldest_open,)] = await self._database.rows(
            _OLDEST_OPEN
        )  # before the look: who ends later is looked for again
        found = [logged_attempt(row) for row in await self._database.rows(_THESE, {"ids": [*self._skipped]})]
        given_up = monotonic() - LEAST_WAIT.total_seconds()
        appeared = {attempt.id for attempt in found}
        self._skipped = {
            number: skipped
            for number, skipped in self._skipped.items()
            if number not in appeared and (skipped.before > oldest_open or skipped.at > given_up)
        }
        return found

    async def _skip(self, ids: Sequence[int]) -> None:
        first = max(self._last + 1, ids[-1] - MAX_SKIPPED)
        missing = set(range(first, ids[-1])).difference(ids)
        if not missing:
            return
        [(next_open,)] = await self._database.rows(_NEXT_OPEN)
        now = _Skipped(at=monotonic(), before=next_open)
        self._skipped |= dict.fromkeys(sorted(missing), now)
        for number in [*self._skipped][:-MAX_SKIPPED]:
            del self._skipped[number]

    async def _begin_anew(self) -> None:
        """Notice that the log was emptied: SQLite then begins with 1 again."""
        [(newest,)] = await self._database.rows(_NEWEST)
        if (newest or 0) < self._last:
            self._last = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a watcher is told: attempts, how many it missed because it was too slow, and whether the database is away.

    `problem` is the type of the database's error, or None once it answers.
    """

    attempts: tuple[LoggedAttempt, ...]
    missed: int
    problem: str | None


class Watcher:
    """Takes what a feed tells; made by `AttemptFeed.watch`. It keeps a bounded number of attempts."""

    def __init__(self) -> None:
        self._waiting: deque[LoggedAttempt] = deque()
        self._missed = 0
        self._problem: str | None = None
        self._told = asyncio.Event()

    async def news(self) -> News:
        """Wait until there is something to tell, and return all of it."""
        await self._told.wait()
        self._told.clear()
        news = News(attempts=tuple(self._waiting), missed=self._missed, problem=self._problem)
        self._waiting.clear()
        self._missed = 0
        return news

    def tell(self, attempts: Sequence[LoggedAttempt], problem: str | None) -> None:
        """Add attempts for `news`, in place of the oldest where it has too many."""
        if not attempts and problem == self._problem:
            return
        self._waiting.extend(attempts)
        self._problem = problem
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._missed += 1
        self._told.set()


class AttemptFeed:
    """Lets any number of tasks of one event loop watch the attempts of a database, with one reader for all.

    The reader runs while somebody watches. A watcher that takes nothing costs the others nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watchers: set[Watcher] = set()
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watcher]:
        """Yield a watcher of what ends from now on, or a moment later.

        Raises:
            SQLAlchemyError: the database did not answer the first question.
        """
        if self._reading is None:
            reader = AttemptReader(self._database)
            await reader.start()
            if self._reading is None:  # another watcher came meanwhile
                self._reading = asyncio.create_task(self._read(reader), name="attempt-feed")
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._reading is not None:
                reading, self._reading = self._reading, None
                reading.cancel()
                await asyncio.wait([reading])

    async def _read(self, reader: AttemptReader) -> None:
        pause = SHORTEST_PAUSE
        while True:
            try:
                attempts, more = await reader.read()
            except SQLAlchemyError as error:
                self._tell([], type(error.__cause__ or error).__name__)
                attempts, more = [], False
            else:
                self._tell(attempts, None)
            pause = SHORTEST_PAUSE if attempts else min(pause * GROWTH, LONGEST_PAUSE)
            if not more:
                await asyncio.sleep(pause.total_seconds())

    def _tell(self, attempts: Sequence[LoggedAttempt], problem: str | None) -> None:
        for watcher in self._watchers:
            watcher.tell(attempts, problem)


_ID = col(DeliveryAttempt.id)
_NEXT: Final = logged_attempts().where(bindparam("last") < _ID).order_by(_ID).limit(PAGE)
_THESE: Final = logged_attempts().where(_ID.in_(bindparam("ids", expanding=True))).order_by(_ID)
_NEWEST: Final = select(func.max(_ID))
# Of PostgreSQL: no transaction below the first is open any more, and all that have begun are below the second.
_OLDEST_OPEN: Final = select(func.txid_snapshot_xmin(func.txid_current_snapshot()))
_NEXT_OPEN: Final = select(func.txid_snapshot_xmax(func.txid_current_snapshot()))
