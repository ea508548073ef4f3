"""The order in which servers are considered as relays: by what they did, never by what a stranger can repeat.

First come those that accepted a delivery directly, then the others, each group by the time of first contact. So a
server gains nothing by introducing itself again, and a new network, in which nobody has delivered yet, finds relays all
the same. The servers of one owner, however many, never fill a selection: the first of every domain comes before the
second of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Select, and_, case, or_, select
from sqlmodel import col

from db import DEFAULT_WIRE, Database, Server, ServerLink
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.sealed.relays.domains import spread_over_domains

MAX_CONSIDERED: Final = 50
_ROWS_READ: Final = 1000
"""How many rows are read: to be alone in a selection, an owner needs a thousand servers, all known for longer."""


async def healthy_by_merit(database: Database) -> Sequence[str]:
    """Return the registered URLs of healthy servers, best first, 50 at most."""
    return await _considered(database, _HEALTHY)


async def sick_by_merit(database: Database) -> Sequence[str]:
    """Return the registered URLs of unhealthy servers that a direct probe may find well, best first, 50 at most."""
    return await _considered(database, _SICK)


async def _considered(database: Database, query: Select[*tuple[Any, ...]]) -> Sequence[str]:
    urls: dict[str, str] = {}  # by origin: rows of the original implementation may be spelled otherwise
    for row in await database.rows(query, {}):
        if origin := _origin(row):
            urls.setdefault(origin, row.url)
    return [urls[origin] for origin in spread_over_domains(urls)[:MAX_CONSIDERED]]


def _origin(row: Row[*tuple[Any, ...]]) -> str | None:
    try:
        return canonical_origin(row.url)
    except UrlError:
        return None


def _by_merit(which: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    delivered = and_(col(ServerLink.acknowledged), col(ServerLink.relayed).is_(False))
    return (
        select(col(Server.url))
        .outerjoin(ServerLink, (col(ServerLink.server_url) == col(Server.url)) & (col(ServerLink.wire) == DEFAULT_WIRE))
        .where(which)
        .order_by(case((delivered, 0), else_=1), col(Server.created_at), col(Server.url))
        .limit(_ROWS_READ)
    )


_HOPELESS: Final = [code for code in NetworkErrorCode if not get_threat_policy(code).direct_health_checkable]
_REASON = col(Server.unhealthy_reason)
_HEALTHY: Final = _by_merit(col(Server.is_healthy).is_(True))
_SICK: Final = _by_merit(and_(col(Server.is_healthy).is_(False), or_(_REASON.is_(None), _REASON.not_in(_HOPELESS))))
