"""How many connections a PostgreSQL server admits."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from workers.storage.abilities import Admission
from workers.storage.sql.direct import Executor

_ADMITTED: Final = text(
    """
    SELECT current_setting('max_connections')::int,
           current_setting('superuser_reserved_connections')::int
           + coalesce(current_setting('reserved_connections', true)::int, 0),
           (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user),
           (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database())
    """
)


def admission(connection: Executor) -> Admission:
    """Ask the PostgreSQL server of this connection."""
    maximum, reserved, role, database = connection.execute(_ADMITTED).one()
    return Admission(maximum=maximum, reserved=reserved, limit=min(filter(None, (role, database)), default=None))
