"""The blacklist as this process knows it: every rule in memory, never much older than the database.

Theory of operation. Triggers count every change of the table, whoever makes it, in one row; an expiry changes nothing
in the table and is compared with the clock at each look-up. A look-up that finds the last check a second old reads that
row first, and reads all rules if the number has changed; the others wait for the same check. So a change takes effect
within a second and the time of a load, a process that looks nothing up asks nothing, and a busy one asks one row a
second. The number is read before the rules: what is written meanwhile is in them, or raises the number again.

Every few minutes the rules are read anyway, in case a table without triggers was put in place of ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
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
from federation.servers.rules import RuleSet
from federation.servers.single_flight import SingleFlight
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
    """The rules at one revision; None where the row that counts is missing, which always means another one."""

    rules: RuleSet
    revision: int | None
    at: float


class Blacklist:
    """Tells which server URLs are blacklisted.

    While the database does not answer, the last rules stay in force; without any, look-ups fail: nothing is delivered
    and nobody let in on an unread blacklist.
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
        """The rule in force that covers *url*, None if it is not blacklisted.

        Raises:
            SQLAlchemyError: the rules were never read, and cannot be read now.
        """
        return (await self._rules()).covering(url, self._clock.now().timestamp())

    def recheck(self) -> None:
        """The next look-up asks the database, also if a check is under way."""
        self._fresh_until = 0.0
        self._checks.forget("")

    async def close(self) -> None:
        """Nothing is being read any more."""
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
            # Counted from now: who waits for a database that hangs shall not wait for it again at once.
            started, loaded = monotonic(), self._loaded
        else:
            self._note_success(loaded)
        if self._checks.is_current(""):  # not overtaken by `recheck`
            self._loaded = loaded
            self._fresh_until = started + self._check_interval
        return loaded.rules

    async def _refreshed(self) -> _Loaded:
        known, now = self._loaded, monotonic()
        # A first look-up may have to wait for a connection; nothing could stand in for its answer.
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
    """Every rule in the database, expired ones included; faster with those *known* from before.

    In pages, between which others have their turn. Each comes as JSON: to make an object for each of a hundred thousand
    rows would take most of a second.
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

    Processes of the original know no expiry: for them a rule ends when its row goes.
    """
    expired = col(BlacklistedServer.expires_at) < (before or datetime.now(UTC))
    async with database.transaction() as session:
        rows = delete(BlacklistedServer).where(expired).returning(col(BlacklistedServer.id))
        return len((await session.execute(rows)).all())


@cache
def _page(*, is_first: bool, is_sqlite: bool) -> Select[*tuple[Any, ...]]:
    """The last id of a page, and its rules and ends as two JSON arrays; but for the first page that after `last`."""
    columns = col(BlacklistedServer.id), col(BlacklistedServer.server_url), col(BlacklistedServer.expires_at)
    rows = select(*columns).order_by(columns[0]).limit(PAGE)
    page = (rows if is_first else rows.where(columns[0] > bindparam("last"))).subquery()
    array = func.json_group_array if is_sqlite else func.json_agg
    return select(func.max(page.c.id), cast(array(page.c.server_url), Text), cast(array(page.c.expires_at), Text))


def _end(text: str) -> datetime | None:
    """The time as the database writes it into JSON; a rule whose end is no time (PostgreSQL's infinity) has none."""
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        return None
    return end if end.tzinfo else end.replace(tzinfo=UTC)
