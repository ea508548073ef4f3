"""Lists of servers, sorted and filtered by what was counted ahead of time: see `rollups/servers`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import select, true
from sqlmodel import col

from db import Database, ServerSummary
from federation.admin.scans import CursorError, Key, ListPage, Scan, small
from federation.rollups.servers import NO_SCORE


class ServerSort(StrEnum):
    """What servers are sorted by."""

    URL = "url"
    OWED = "owed"
    HELD = "held"
    GIVEN_UP = "given_up"
    SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """A server, as of the last count. `link` is the state of its link, or `on_hold` or `resting`.

    `advice` and `score` are None before the analytics have judged it; `given_up` is failed and expired together.
    """

    server_url: str
    link: str
    link_since: datetime | None
    advice: str | None
    score: float | None
    ready: int
    held: int
    owed: int
    failed: int
    expired: int
    given_up: int
    oldest_at: datetime | None


async def page_of_servers(
    database: Database,
    *,
    sort: ServerSort = ServerSort.URL,
    descending: bool = False,
    link: str | None = None,
    advice: str | None = None,
    limit: int = 50,
    after: str | None = None,
) -> ListPage[SummaryRow]:
    """Return servers whose link is in that state, and for which the analytics advise that, from where a page ended.

    Servers without a score come below all others.

    Raises:
        CursorError: *after* is no cursor of this order.
    """
    scan = _scan(sort, descending=descending, link=link, advice=advice)
    keys, end = await scan.keys_of_page(database, limit=limit, after=None if after is None else _key(after, sort))
    urls = [key[-1] for key in keys]
    found = {row.server_url: row for row in await database.rows(_ROWS.where(col(ServerSummary.server_url).in_(urls)))}
    rows = [_row(dict(found[url]._mapping)) for url in urls if url in found]
    return ListPage(rows=tuple(rows), after=None if end is None else _cursor(end))


async def summary_of(database: Database, server_url: str) -> SummaryRow | None:
    """Return one server, or None if nothing is known of it."""
    rows = await database.rows(_ROWS.where(col(ServerSummary.server_url) == server_url))
    return _row(dict(rows[0]._mapping)) if rows else None


def _scan(sort: ServerSort, *, descending: bool, link: str | None, advice: str | None) -> Scan:
    """Choose the index: each order has one for all servers, for those of a link's state, and for those of an advice."""
    keys = [_TABLE.c.server_url] if sort is ServerSort.URL else [_TABLE.c[sort.value], _TABLE.c.server_url]
    is_link, is_advised = col(ServerSummary.link) == link, col(ServerSummary.advice) == advice
    if link is not None:
        return Scan(keys=keys, ranges=[is_link], wanted=None if advice is None else is_advised, descending=descending)
    return Scan(keys=keys, ranges=[true() if advice is None else is_advised], descending=descending)


def _row(values: dict[str, Any]) -> SummaryRow:  # Any: values of columns of any type
    score = None if values["score"] == NO_SCORE else values["score"]
    return SummaryRow(**values | {"advice": values["advice"] or None, "score": score})


def _cursor(key: Key) -> str:
    return " ".join(map(str, key))


def _key(cursor: str, sort: ServerSort) -> Key:
    if sort is ServerSort.URL:
        return (cursor,)
    value, _, url = cursor.partition(" ")
    try:
        return (float(value) if sort is ServerSort.SCORE else small(value)), url
    except ValueError:
        raise CursorError from None


_TABLE: Final = ServerSummary.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_ROWS: Final = select(*(col(getattr(ServerSummary, name)) for name in SummaryRow.__dataclass_fields__))
