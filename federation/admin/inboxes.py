"""Inboxes of other servers, as ActivityPub names them: what is owed to each, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute
from sqlmodel import col

from db import ActivityInbox, Database, DeliveryJob, DeliveryState
from federation.activitypub.activities import WIRE
from federation.activitypub.inboxes import SKIPPED_FOR, GoneInbox, gone_since
from federation.admin.words import moment
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin

MOST_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxRow:
    """An inbox: how many deliveries to it are in each state, and since when something is wrong with it, if it is."""

    url: str
    ready: int = 0
    held: int = 0
    failed: int = 0
    expired: int = 0
    gone_at: datetime | None = None
    gone_code: int | None = None
    missing_since: datetime | None = None
    missing_last: datetime | None = None
    is_shared: bool = False
    tried_at: datetime | None = None

    def sentences(self, now: datetime) -> Iterator[str]:
        """Yield the same as sentences for people."""
        if self.gone_at is not None:
            since = f"since {moment(self.gone_at)}, by {self.gone_code}"
            yield f"The inbox {self.url} is gone {since}: {self._skipped(now)}."
        elif self.missing_since is not None and self.missing_last is not None:
            first, last = moment(self.missing_since), moment(self.missing_last)
            whole = "" if self.is_shared else "; over a week of that it is gone"
            yield f"The inbox {self.url} was not found (404) from {first} to {last}, and took nothing since{whole}."
        states = {"ready": self.ready, "held": self.held, "failed": self.failed, "expired": self.expired}
        told = ", ".join(f"{number} {state}" for state, number in states.items() if number)
        yield f"Deliveries to the inbox {self.url}: {told or 'none is owed, or was given up lately'}."

    def _skipped(self, now: datetime) -> str:
        assert self.gone_at is not None
        if now >= self.gone_at + SKIPPED_FOR:
            return "the next activity is sent to it again"
        once = ", but for one activity a day" if self.is_shared else ""
        return f"what was owed to it failed, and nothing is sent until {moment(self.gone_at + SKIPPED_FOR)}{once}"


async def inboxes_at(database: Database, url: str) -> Sequence[InboxRow]:
    """Return the inboxes that a URL names: itself, or those below an actor's. None if it names a whole server.

    Only those are known to which something is owed or was given up lately, or with which something was wrong.
    """
    try:
        server_url = canonical_origin(url)
    except UrlError:
        return ()
    if url.removeprefix(server_url) in ("", "/"):
        return ()
    target = col(DeliveryJob.target_url)
    counts = (
        select(target, col(DeliveryJob.state), func.count().label("number"))
        .where(
            col(DeliveryJob.server_url) == server_url,
            col(DeliveryJob.wire) == WIRE,
            _is_at(DeliveryJob.target_url, url),
        )
        .group_by(target, col(DeliveryJob.state))
        .order_by(target)
        .limit(MOST_SHOWN * len(DeliveryState))
    )
    wrong = select(*(getattr(ActivityInbox, name) for name in _WRONG)).where(_is_at(ActivityInbox.url, url))
    wrong = wrong.order_by(col(ActivityInbox.url)).limit(MOST_SHOWN)
    found: dict[str, dict[str, Any]] = {}  # Any: values of columns of any type
    for row in await database.rows(counts):
        found.setdefault(row.target_url, {})[row.state.value] = row.number
    for row in await database.rows(wrong):
        found.setdefault(row.url, {}).update(row._mapping)
    # SQLite's LIKE takes capitals for small letters.
    named = sorted(each for each in found if each == url or each.startswith(f"{url.rstrip('/')}/"))
    return [InboxRow(**{"url": each} | found[each]) for each in named[:MOST_SHOWN]]


async def gone(database: Database, since: datetime) -> Sequence[GoneInbox]:
    """Return the inboxes that were found to be gone since then, the first one first."""
    async with database.read() as session:
        return await session.run_sync(lambda inside: gone_since(inside.connection(), since))


def _is_at(column: InstrumentedAttribute[str] | str, url: str) -> ColumnElement[bool]:
    return or_(col(column) == url, col(column).startswith(f"{url.rstrip('/')}/", autoescape=True))


_WRONG: Final = ("url", "gone_at", "gone_code", "missing_since", "missing_last", "is_shared", "tried_at")
