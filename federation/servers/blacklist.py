"""The blacklist as this process knows it: every rule in memory, never much older than the database.

Theory of operation. Triggers count every change of the table, whoever makes it, in one row; an expiry changes nothing
in the table and is compared with the clock at each look-up. If a look-up finds the last check a second old, it reads
that row first, and reads all rules if the number has changed; other look-ups wait for the same check. So a change takes
effect within a second and the time of a load. A process without look-ups reads nothing, and a busy one reads one row a
second. The number is read before the rules: a change in between is in the rules, or raises the number again.

Every few minutes the rules are read in any case, because a table without triggers may have replaced ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import Select, Text, bindparam, cast, delete, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as DatabaseTimeout
from sqlmodel import col

from db import BlacklistedServer, BlacklistRevision, Database
from federation.base.cache import SingleFlight
from federation.servers.blacklist_rules import RuleSet
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

T = TypeVar("T")

CHECK_INTERVAL: Final = timedelta(seconds=1)
RELOAD_INTERVAL: Final = timedelta(minutes=5)
CHECK_TIMEOUT: Final = timedelta(seconds=2)
LOAD_TIMEOUT: Final = timedelta(seconds=60)
PAGE: Final = 20_000
REVISION_ROW: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """The rules at one revision.

    None means that the row that counts is missing, which is taken for a change every time.
    """

    rules: RuleSet
    revision: int | None
    at: float


class Blacklist:
    """Tells which server URLs are blacklisted.

    While the database does not answer, the last rules stay in force. If none were ever read, look-ups fail: nothing is
    delivered and nobody is let in on an unread blacklist.
    """

    def __init__(
        self,
        database: Database,
        *,
        check_interval: timedelta = CHECK_INTERVAL,
        reload_interval: timedelta = RELOAD_INTERVAL,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._check_interval = check_interval.total_seconds()
        self._reload_interval = reload_interval.total_seconds()
        self._clock = clock or SystemClock()
        self._loaded: _Loaded | None = None
        self._fresh_until = 0.0
        self._is_behind = False
        self._checks: SingleFlight[RuleSet] = SingleFlight()

    async def covering(self, url: str) -> str | None:
        """Return the rule in force that covers *url*, or None if it is not blacklisted.

        Raises:
            SQLAlchemyError: the rules were never read, and cannot be read now.
        """
        return (await self._rules()).covering(url, self._clock.now().timestamp())

    async def covered(self, urls: Iterable[str]) -> set[str]:
        """Return those of the URLs that are blacklisted.

        Raises:
            SQLAlchemyError: as `covering`.
        """
        rules = await self._rules()
        if not len(rules):
            return set()
        now = self._clock.now().timestamp()
        return {url for url in urls if rules.covering(url, now) is not None}

    def recheck(self) -> None:
        """Make the next look-up ask the database, even if a check is under way."""
        self._fresh_until = 0.0
        self._checks.forget("")

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._checks.close()

    async def _rules(self) -> RuleSet:
        if self._loaded is not None and monotonic() < self._fresh_until:
            return self._loaded.rules
        return await self._checks.run("", self._check)

    async def _check(self) -> RuleSet:
        started = monotonic()
        try:
            loaded = await self._refreshed()
        except (SQLAlchemyError, OSError) as error:
            if self._loaded is None:
                raise
            self._note_trouble(error)
            # Counted from now: those who waited for a database that hangs must not wait for it again at once.
            started, loaded = monotonic(), self._loaded
        else:
            self._note_success(loaded)
        if self._checks.is_current(""):  # not overtaken by `recheck`
            self._loaded = loaded
            self._fresh_until = started + self._check_interval
        return loaded.rules

    async def _refreshed(self) -> _Loaded:
        known, now = self._loaded, monotonic()
        # The first look-up gets more time: it may have to wait for a connection, and there are no older rules to use.
        revision = await _within(LOAD_TIMEOUT if known is None else CHECK_TIMEOUT, self._revision())
        is_same = known is not None and revision is not None and revision == known.revision
        if known is not None and is_same and now < known.at + self._reload_interval:
            return known
        loading = load_rules(self._database, known=known.rules if known else None)
        return _Loaded(rules=await _within(LOAD_TIMEOUT, loading), revision=revision, at=now)

    async def _revision(self) -> int | None:
        found = await self._database.rows(_REVISION)
        return int(found[0].revision) if found else None

    def _note_trouble(self, error: Exception) -> None:
        if not self._is_behind:
            log.error("blacklist_behind", error=type(error).__name__)
        self._is_behind = True

    def _note_success(self, loaded: _Loaded) -> None:
        if self._is_behind:
            log.info("blacklist_current", rules=len(loaded.rules))
        elif self._loaded is not None and loaded.revision != self._loaded.revision:
            log.info("blacklist_changed", rules=len(loaded.rules))
        self._is_behind = False


_REVISION: Final = select(col(BlacklistRevision.revision)).where(col(BlacklistRevision.id) == REVISION_ROW)


async def _within(limit: timedelta, reading: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(limit.total_seconds()):
            return await reading
    except TimeoutError:
        raise DatabaseTimeout(f"the blacklist was not read within {limit.total_seconds():g} s") from None


async def load_rules(database: Database, *, known: RuleSet | None = None) -> RuleSet:
    """Return every rule in the database, expired ones included. Passing the *known* rules makes it faster.

    The rules are read in pages, and other tasks run in between. Each page comes as JSON: making an object for each of a
    hundred thousand rows would take most of a second.
    """
    rules = RuleSet()
    last: str | None = None
    while True:
        query = _page(is_first=last is None, is_sqlite=database.is_sqlite)
        ((last, texts, ends),) = await database.rows(query, {} if last is None else {"last": last})
        if last is None:
            return rules
        for text, end in zip(json.loads(texts), json.loads(ends), strict=True):
            rules.add(text, None if end is None else _end(end), known=known)
        await asyncio.sleep(0)


async def purge_expired(database: Database, *, before: datetime | None = None) -> int:
    """Delete the rows that expired before *before*, by default now, and return how many.

    Processes of the original implementation know no expiry: for them a rule ends when its row is deleted.
    """
    expired = col(BlacklistedServer.expires_at) < (before or datetime.now(UTC))
    async with database.transaction() as session:
        rows = delete(BlacklistedServer).where(expired).returning(col(BlacklistedServer.id))
        return len((await session.execute(rows)).all())


@cache
def _page(*, is_first: bool, is_sqlite: bool) -> Select[*tuple[Any, ...]]:
    """Build the query for a page: its last id, and its rules and their ends as two JSON arrays.

    Every page but the first begins after the id `last`.
    """
    columns = col(BlacklistedServer.id), col(BlacklistedServer.server_url), col(BlacklistedServer.expires_at)
    rows = select(*columns).order_by(columns[0]).limit(PAGE)
    page = (rows if is_first else rows.where(columns[0] > bindparam("last"))).subquery()
    array = func.json_group_array if is_sqlite else func.json_agg
    return select(func.max(page.c.id), cast(array(page.c.server_url), Text), cast(array(page.c.expires_at), Text))


def _end(text: str) -> datetime | None:
    """Parse a time as the database writes it into JSON.

    An end that is no time (PostgreSQL's infinity) counts as none.
    """
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        return None
    return end if end.tzinfo else end.replace(tzinfo=UTC)
