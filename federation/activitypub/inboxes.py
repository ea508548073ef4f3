"""Inboxes of others with which something is wrong: they were not found for a while, or are gone.

Theory of operation. An inbox has a row only once something was wrong with it, and loses it when it takes an activity.
A 410 says that it is gone, and so do 404s over a week, unless the inbox is shared by all actors of its server, whose
loss would be that of all of them. Then what is owed to it fails, in the transaction that says so. `send` skips it for a
while and tries again later; whoever sends knows which inboxes are shared, and so says it here.

Whoever signs an activity is there, and so may be his inbox: it loses its row, too, if it is known whose it is. A shared
one does not, of which an actor proves nothing: it is tried each day anyway.

A process reads once a minute which inboxes have rows, and adds those that it notes, so that a delivery to any other
costs no statement. An inbox that another process noted within that minute keeps its row until the next activity that it
takes. Strangers can make as many inboxes as they like that are not found: a process knows `MAX_KNOWN`. Where there are
more, a delivery that was taken looks for its own inbox, by the key. The table loses after 90 days what nothing is heard
of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, ClassVar, Final, Self

import structlog
from sqlalchemy import Connection, Executable, Row, bindparam, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import col

from db import ActivityFollow, ActivityInbox, Database, among
from federation.activitypub.codes import GONE, NOT_FOUND
from federation.base.cache import LoadingCache
from federation.delivery.ledger.statements import fail_owed
from federation.delivery.wire import Fragment
from workers.clock import Clock

log = structlog.get_logger(__name__)

SKIPPED_FOR: Final = timedelta(days=30)
"""How long nothing is sent to an inbox that is gone."""
MISSING_FOR: Final = timedelta(days=6)
"""The first and the last 404 lie this far apart, so that they cover seven days."""
TRIED_EVERY: Final = timedelta(days=1)
"""How often a shared inbox that is gone is tried nevertheless."""
NOTED_EVERY: Final = timedelta(hours=1)
"""A 404 within this time of the one noted before, by this process, tells nothing new."""
KNOWN_FOR: Final = timedelta(minutes=1)
MAX_NOTED: Final = 10_000
MAX_KNOWN: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneInbox:
    """An inbox that is no more, since when, and by which status."""

    url: str
    server_url: str
    gone_at: datetime
    code: int


@dataclass(frozen=True, slots=True)
class InboxForgotten:
    """The effect of an activity that was taken by an inbox with which something had been wrong."""

    url: str

    fragment: ClassVar[Fragment | None] = None  # it is rare

    @classmethod
    def apply(cls, connection: Connection, effects: Sequence[Self], /) -> Sequence[bool]:
        """Remove the inboxes' rows, but for those that somebody writes at this moment: the next activity does.

        The ledger holds deliveries by now. Whoever notes that an inbox is gone holds its row and wants deliveries.
        """
        removed = set(_free(connection, {each.url for each in effects}))
        connection.execute(_REMOVED, {"urls": sorted(removed)})
        return [each.url in removed for each in effects]

    def log_missed(self, *, delivery_id: str) -> None:
        """Say nothing: somebody else's activity was taken, too."""


class Inboxes:
    """Notes what inboxes answer, and knows of `max_known` with which something was wrong. Close it."""

    def __init__(self, database: Database, *, clock: Clock, max_known: int = MAX_KNOWN) -> None:
        self._database = database
        self._clock = clock
        self._max_known = max_known
        self._known: LoadingCache[set[str]] = LoadingCache(self._load, ttl=KNOWN_FOR)  # one more: there are others
        self._noted: dict[str, datetime] = {}

    async def taken(self, url: str) -> InboxForgotten | None:
        """Return the effect of an activity that the inbox took; None for an inbox with which nothing was wrong."""
        known = await self._known.get(_ALL)
        if url not in known and (len(known) <= self._max_known or not await self._has_row(url)):
            return None
        self._noted.pop(url, None)
        return InboxForgotten(url)

    async def missing(self, url: str, server_url: str, *, delivery_id: str) -> None:
        """Note that the inbox answered 404. Once these cover a week it is gone, unless it is shared."""
        now = self._clock.now()
        if (noted := self._noted.get(url)) is not None and noted <= now < noted + NOTED_EVERY:
            return
        failed = await self._database.transact(
            lambda connection: _not_found(connection, url, server_url, delivery_id, now)
        )
        await self._know(url)
        if len(self._noted) >= MAX_NOTED:
            self._noted.clear()
        self._noted[url] = now
        _tell(url, server_url, NOT_FOUND, failed)

    async def gone(self, url: str, server_url: str, *, delivery_id: str) -> None:
        """Note that the inbox is gone, and fail what is owed to it but for the delivery that found out."""
        now = self._clock.now()
        failed = await self._database.transact(
            lambda connection: _lost(connection, url, server_url, delivery_id, now, GONE)
        )
        await self._know(url)
        _tell(url, server_url, GONE, failed)

    async def heard_of(self, actor: str, *shown: str) -> None:
        """Forget what was wrong with the inbox of an actor who has signed something: one of *shown*, or of his follows.

        Raises:
            SQLAlchemyError: the database failed.
        """
        known = await self._known.get(_ALL)
        if not known:
            return
        urls = {*shown, *(row.inbox for row in await self._database.rows(_OF_ACTOR, {"actor": actor}))}
        wrong = urls if len(known) > self._max_known else urls & known
        if wrong:
            await self._database.transact(partial(_forget_own, urls=wrong))
            for url in wrong:
                self._noted.pop(url, None)

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._known.close()

    async def _know(self, url: str) -> None:
        """Know an inbox whose row was committed: what is read meanwhile may be without it.

        It stays known until the next reading though an activity that it takes removes the row: the ledger may not.
        """
        known = await self._known.get(_ALL)
        if len(known) <= self._max_known:
            known.add(url)

    async def _has_row(self, url: str) -> bool:
        return bool(await self._database.rows(_ONE, {"inbox": url}))

    async def _load(self, _key: str) -> set[str]:
        return {row.url for row in await self._database.rows(_URLS, {"most": self._max_known + 1})}


def gone_since(connection: Connection, since: datetime) -> list[GoneInbox]:
    """Return the inboxes that were found to be gone since then, the first one first."""
    return [
        GoneInbox(url=row.url, server_url=row.server_url, gone_at=row.gone_at, code=row.gone_code)
        for row in connection.execute(_SINCE, {"since": since})
    ]


def gone_among(connection: Connection, urls: Iterable[str], now: datetime, *, shared: Collection[str] = ()) -> set[str]:
    """Return those of the inboxes to which nothing is sent now, in a transaction that may write.

    `shared` are those that are shared by the actors of their servers. Of one that is gone an activity goes out each
    day: the one of whoever asks first. The transaction is an application's, and may last: it waits for no row, and one
    that somebody else writes at this moment says another time that it is shared, and is tried by that one.
    """
    rows = connection.execute(_AMONG, {"urls": sorted(set(urls))}).all()
    news = {row.url for row in rows if row.url in shared and not row.is_shared}
    gone = [row for row in rows if _is_gone(row, now, is_shared=row.is_shared or row.url in shared)]
    due = {row.url for row in gone if (row.is_shared or row.url in shared) and _may_be_tried(row, now)}
    free = _free(connection, news | due) if news or due else []
    if told := [url for url in free if url in news]:
        connection.execute(_SHARED, {"urls": told})
    if tried := [url for url in free if url in due]:
        connection.execute(_TRIED, {"urls": tried, "at": now})
    return {row.url for row in gone}.difference(tried)


def _is_gone(row: Row[*tuple[Any, ...]], now: datetime, *, is_shared: bool) -> bool:
    """Tell whether the inbox is skipped. A shared one is not gone because it was not found."""
    is_recent = row.gone_at is not None and now < row.gone_at + SKIPPED_FOR
    return bool(is_recent and not (is_shared and row.gone_code == NOT_FOUND))


def _may_be_tried(row: Row[*tuple[Any, ...]], now: datetime) -> bool:
    return bool(now - max(row.gone_at, row.tried_at or row.gone_at) >= TRIED_EVERY)


def _not_found(connection: Connection, url: str, server_url: str, delivery_id: str, now: datetime) -> int | None:
    """Note a 404. Return how many deliveries failed, or None if the inbox is not gone by this one."""
    row = _locked(connection, url, server_url)
    if row.gone_at is not None and row.is_shared:
        return None
    since = now if row.missing_since is None else min(row.missing_since, now)
    connection.execute(_MISSING, {"inbox": url, "since": since, "last": now})
    is_gone = row.gone_at is not None or (now - since >= MISSING_FOR and not row.is_shared)
    return _lost(connection, url, server_url, delivery_id, now, NOT_FOUND) if is_gone else None


def _lost(connection: Connection, url: str, server_url: str, delivery_id: str, now: datetime, code: int) -> int | None:
    """Note that the inbox is gone. Return how many deliveries failed, or None if that was known."""
    was_gone = _locked(connection, url, server_url).gone_at is not None
    connection.execute(_GONE, {"inbox": url, "at": now, "status": code})
    failed = fail_owed(
        connection,
        url,
        server_url=server_url,
        code="INBOX_GONE",
        error="its inbox is gone, as another delivery found out",
        now=now,
        but=delivery_id,
    )
    return None if was_gone and not failed else failed


def _free(connection: Connection, urls: Iterable[str]) -> Sequence[str]:
    """Return those of the inboxes that have a row which nobody else writes, locked until the transaction ends."""
    return connection.execute(_FREE, {"urls": sorted(urls)}).scalars().all()


def _forget_own(connection: Connection, urls: Iterable[str]) -> None:
    """Remove the rows of the inboxes that are not shared, but for those that somebody writes at this moment."""
    found = connection.execute(_FREE_OWN, {"urls": sorted(urls)}).scalars().all()
    connection.execute(_REMOVED, {"urls": found})


def _locked(connection: Connection, url: str, server_url: str) -> Row[*tuple[Any, ...]]:
    """Return the inbox's row, locked until the transaction ends; make it if there is none."""
    values = {"url": url, "server_url": server_url, "is_shared": False}
    return connection.execute(_made(connection.dialect.name), values).one()


def _tell(url: str, server_url: str, status: int, failed: int | None) -> None:
    if failed is not None:
        log.info("inbox_gone", inbox=url, server_url=server_url, status=status, failed=failed)


_ALL: Final = ""
_TABLE: Final = ActivityInbox.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_URLS: Final = select(_TABLE.c.url).limit(bindparam("most"))
_ONE: Final = select(_TABLE.c.url).where(_TABLE.c.url == bindparam("inbox"))
_AMONG: Final = select(_TABLE).where(among(_TABLE.c.url, "urls"))
_SINCE: Final = select(_TABLE).where(_TABLE.c.gone_at >= bindparam("since")).order_by(_TABLE.c.gone_at, _TABLE.c.url)
_MISSING: Final = (
    update(_TABLE)
    .where(_TABLE.c.url == bindparam("inbox"))
    .values(missing_since=bindparam("since"), missing_last=bindparam("last"))
)
_GONE: Final = (
    update(_TABLE)
    .where(_TABLE.c.url == bindparam("inbox"))
    .values(gone_at=bindparam("at"), gone_code=bindparam("status"))
)
_SHARED: Final = update(_TABLE).where(among(_TABLE.c.url, "urls")).values(is_shared=True)
_TRIED: Final = update(_TABLE).where(among(_TABLE.c.url, "urls")).values(tried_at=bindparam("at"))
_REMOVED: Final = delete(_TABLE).where(among(_TABLE.c.url, "urls"))
_FREE: Final = (  # SQLite has one writer, and leaves the lock out
    select(_TABLE.c.url).where(among(_TABLE.c.url, "urls")).order_by(_TABLE.c.url).with_for_update(skip_locked=True)
)
_FREE_OWN: Final = _FREE.where(_TABLE.c.is_shared.is_(False))
_OF_ACTOR: Final = select(col(ActivityFollow.inbox)).where(col(ActivityFollow.remote_actor) == bindparam("actor"))


@cache
def _made(dialect: str) -> Executable:
    """Make the insert of a row that locks and returns one that is there, by one statement: none may go in between."""
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(_TABLE)
    return insert.on_conflict_do_update(index_elements=["url"], set_={"url": insert.excluded.url}).returning(_TABLE)
