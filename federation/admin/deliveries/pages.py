"""Lists of deliveries by age, a page at a time, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import ColumnElement, and_, or_
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState
from federation.admin.deliveries.deliveries import OPEN, DeliveryRow, Selection, delivery_rows, says
from federation.admin.scans import MOST_SHOWN, ListPage, Scan, timed_cursor, timed_key
from federation.delivery.rows import OPEN_STATES, TABLE
from federation.protocol.urls import canonical_origin


async def page_of_deliveries(
    database: Database, selection: Selection, *, newest_first: bool = False, limit: int = 50, after: str | None = None
) -> ListPage[DeliveryRow]:
    """Return selected deliveries by when they were made, from where the page before ended.

    A server's deliveries are those that name it: a Node producer's do so from their first job on.

    Raises:
        CursorError: *after* is no cursor.
        ValueError: more ids are selected than a page shows.
    """
    scan = replace(_scan(selection), descending=newest_first)
    keys, end = await scan.keys_of_page(database, limit=limit, after=timed_key(after, str))
    ids = [key[-1] for key in keys]
    found = {row.id: row for row in await database.rows(delivery_rows().where(col(DeliveryJob.id).in_(ids)))}
    rows = [DeliveryRow(**found[each]._mapping) for each in ids if each in found]
    return ListPage(rows=tuple(rows), after=timed_cursor(end))


def _scan(selection: Selection) -> Scan:
    """Choose the index by which the selection is read: that of the text, the server, the code, or the state."""
    if selection.activity_id is not None:
        these, others = says(selection.activity_id), replace(selection, activity_id=None).conditions()
        return Scan(keys=_KEYS, ranges=[these], wanted=and_(*others) if others else None)
    if selection.ids:
        if len(selection.ids) > MOST_SHOWN:
            raise ValueError(f"more than {MOST_SHOWN} ids")
        these, others = col(DeliveryJob.id).in_(selection.ids), replace(selection, ids=()).conditions()
        return Scan(keys=_KEYS, ranges=[these], wanted=and_(*others) if others else None)
    made = [] if selection.older_than is None else [datetime.now(UTC) - selection.older_than > _MADE]
    states = _states(selection)
    code = None if selection.code is None else col(DeliveryJob.error_code) == selection.code
    if selection.inbox is not None:
        found = _scan(replace(selection, inbox=None, server_url=canonical_origin(selection.inbox)))
        at_inbox = col(DeliveryJob.target_url) == selection.inbox
        return replace(found, wanted=at_inbox if found.wanted is None else and_(at_inbox, found.wanted))
    if selection.server_url is not None:
        ranges = [and_(col(DeliveryJob.server_url) == selection.server_url, each, *made) for each in states]
        return Scan(keys=_KEYS, ranges=ranges, wanted=code)
    if code is not None:
        wanted = None if selection.state is None else or_(*states)
        return Scan(keys=_KEYS, ranges=[and_(code, *made)], wanted=wanted)
    return Scan(keys=_KEYS, ranges=[and_(each, *made) for each in states])


def _states(selection: Selection) -> Sequence[ColumnElement[bool]]:
    """Return a condition for each state."""
    if selection.state is None:
        chosen: Sequence[DeliveryState] = [*DeliveryState]
    else:
        chosen = OPEN_STATES if selection.state == OPEN else [DeliveryState(selection.state)]
    return [col(DeliveryJob.state) == state for state in chosen]


_MADE = col(DeliveryJob.created_at)
_KEYS: Final = (TABLE.c.created_at, TABLE.c.id)
