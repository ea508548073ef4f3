"""A row per server for lists: its link, its advice, and how many deliveries are in each state.

Theory of operation. The counts are taken anew each time, because rows of `delivery_jobs` are written by Node as well:
whatever anybody did to them, the next count is right. An index has all that is counted. The database compares the
result with what `server_summaries` has, and returns the rows that differ: normally few, which are then written in small
transactions. Processes that do it at once write the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    bindparam,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import col

from db import (
    DEFAULT_WIRE,
    Database,
    DeliveryJob,
    DeliveryState,
    LinkState,
    Server,
    ServerLink,
    ServerScorecard,
    ServerSummary,
)
from federation.servers.link_rules import LONGEST_REST
from workers.clock import Clock, SystemClock

BATCH: Final = 500
ON_HOLD: Final = "on_hold"
"""The state of links that an operator holds, whatever their other state."""
RESTING: Final = "resting"
"""The state of links that are up, to servers that asked for a pause."""
NO_ADVICE: Final = ""
NO_SCORE: Final = -1.0
WINDOW_DAYS: Final = 7
"""The window of the scorecards that are shown."""


class ServerSummaries:
    """Brings `server_summaries` up to date."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def __call__(self) -> int:
        """Write the rows of servers that have changed, and remove those of servers that are gone. Return how many.

        Raises:
            SQLAlchemyError: the database failed; the next run does the rest.
        """
        now = self._clock.now()
        changed = await self._database.rows(_CHANGED, {"now": now, "latest": now + LONGEST_REST})
        gone = [row.server_url for row in await self._database.rows(_GONE)]
        for start in range(0, len(changed), BATCH):
            rows = [_values(row) for row in changed[start : start + BATCH]]
            await self._database.transact(partial(_write, rows=rows))
        for start in range(0, len(gone), BATCH):
            await self._database.transact(partial(_remove, urls=gone[start : start + BATCH]))
        return len(changed) + len(gone)


def _values(row: Row[*tuple[Any, ...]]) -> dict[str, object]:
    return dict(row._mapping)


def _write(connection: Connection, *, rows: Sequence[dict[str, object]]) -> None:
    upsert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(_TABLE)
    changed = {name: upsert.excluded[name] for name in _NAMES if name != "server_url"}
    connection.execute(upsert.on_conflict_do_update(index_elements=[_TABLE.c.server_url], set_=changed), rows)


def _remove(connection: Connection, *, urls: Sequence[str]) -> None:
    connection.execute(_REMOVED, {"urls": urls})


def _counts() -> Select[*tuple[Any, ...]]:
    """Count the deliveries of each server. Without the states' oldest times this would be the same scan."""
    state = col(DeliveryJob.state)
    counted = {each.value: func.count().filter(state == each) for each in DeliveryState}
    is_owed = state.in_((DeliveryState.READY, DeliveryState.HELD))
    return (
        select(
            col(DeliveryJob.server_url).label("server_url"),
            *(number.label(name) for name, number in counted.items()),
            func.min(col(DeliveryJob.created_at)).filter(is_owed).label("oldest_at"),
        )
        .where(col(DeliveryJob.server_url).is_not(None))
        .group_by(col(DeliveryJob.server_url))
    )


def _link() -> ColumnElement[str]:
    rest = col(ServerLink.rest_until)
    state: ColumnElement[str] = type_coerce(col(ServerLink.state), Text)
    # A pause that ends later than any pause lasts was written by a wrong clock.
    is_resting = (rest > bindparam("now")) & (rest <= bindparam("latest"))
    return case(
        (col(ServerLink.state).is_(None), LinkState.UP.value),
        (col(ServerLink.operator_hold).is_(True), ON_HOLD),
        (state != LinkState.UP.value, state),
        (is_resting, RESTING),
        else_=LinkState.UP.value,
    )


def _summaries() -> Select[*tuple[Any, ...]]:
    counts = _counts().cte("counts")
    urls = (
        select(col(Server.url).label("server_url"))
        .union(select(col(ServerLink.server_url)), select(counts.c.server_url))
        .subquery("urls")
    )
    is_link = (col(ServerLink.server_url) == urls.c.server_url) & (col(ServerLink.wire) == DEFAULT_WIRE)
    is_card = (col(ServerScorecard.server_url) == urls.c.server_url) & (col(ServerScorecard.window_days) == WINDOW_DAYS)
    number = {each.value: func.coalesce(counts.c[each.value], 0) for each in DeliveryState}
    return (
        select(
            urls.c.server_url,
            _link().label("link"),
            col(ServerLink.since).label("link_since"),
            func.coalesce(col(ServerScorecard.action), NO_ADVICE).label("advice"),
            func.coalesce(col(ServerScorecard.score), NO_SCORE).label("score"),
            *(value.label(name) for name, value in number.items()),
            (number["ready"] + number["held"]).label("owed"),
            (number["failed"] + number["expired"]).label("given_up"),
            counts.c.oldest_at,
        )
        .select_from(urls)
        .outerjoin(ServerLink, is_link)
        .outerjoin(ServerScorecard, is_card)
        .outerjoin(counts, counts.c.server_url == urls.c.server_url)
    )


def _changed() -> Select[*tuple[Any, ...]]:
    new = _summaries().subquery("new")
    differs = (new.c[name].is_distinct_from(_TABLE.c[name]) for name in _NAMES if name != "server_url")
    return (
        select(*(new.c[name] for name in _NAMES))
        .outerjoin(_TABLE, _TABLE.c.server_url == new.c.server_url)
        .where(or_(_TABLE.c.server_url.is_(None), *differs))
    )


def _gone() -> Select[*tuple[Any, ...]]:
    """Find rows whose server is in none of the tables any more, by a look at an index of each."""
    url = _TABLE.c.server_url
    places = (col(Server.url), col(ServerLink.server_url), col(DeliveryJob.server_url))
    return select(url).where(*(~select(literal(1)).where(place == url).exists() for place in places))


_TABLE: Final = ServerSummary.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_NAMES: Final[Sequence[str]] = [column.name for column in _TABLE.columns]
_CHANGED: Final = _changed()
_GONE: Final = _gone()
_REMOVED: Final = delete(_TABLE).where(_TABLE.c.server_url.in_(bindparam("urls", expanding=True)))
