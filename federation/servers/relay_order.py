"""In which order servers are considered as relays: by what they did, never by what a stranger can repeat.

First come those that took a delivery directly, then the others, each since first contact: introducing itself again
buys a server nothing, and a new network, in which nobody has delivered yet, finds relays all the same. One owner's
servers, however many, never fill a selection: of each domain the first comes before the second of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Select, and_, case, or_, select
from sqlmodel import col

from db import Database, Server, ServerLink
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.servers.domains import spread_over_domains

MAX_CONSIDERED: Final = 50
_ROWS_READ: Final = 1000
"""So many that an owner needs a thousand servers, each of them known for longer, to be alone in a selection."""


async def healthy_by_merit(database: Database) -> Sequence[str]:
    """The registered URLs of healthy servers, best first: 50 at most."""
    return await _considered(database, _HEALTHY)


async def sick_by_merit(database: Database) -> Sequence[str]:
    """The registered URLs of servers whose sickness a direct probe may tell about, best first: 50 at most."""
    return await _considered(database, _SICK)


async def _considered(database: Database, query: Select[*tuple[Any, ...]]) -> Sequence[str]:
    urls: dict[str, str] = {}  # by origin: rows of the original may be spelled otherwise
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
        .outerjoin(ServerLink, col(ServerLink.server_url) == col(Server.url))
        .where(which)
        .order_by(case((delivered, 0), else_=1), col(Server.created_at), col(Server.url))
        .limit(_ROWS_READ)
    )


_HOPELESS: Final = [code for code in NetworkErrorCode if not get_threat_policy(code).direct_health_checkable]
_REASON = col(Server.unhealthy_reason)
_HEALTHY: Final = _by_merit(col(Server.is_healthy).is_(True))
_SICK: Final = _by_merit(and_(col(Server.is_healthy).is_(False), or_(_REASON.is_(None), _REASON.not_in(_HOPELESS))))
