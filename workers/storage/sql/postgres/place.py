"""What a session on PostgreSQL works on, by which a caller's is compared with ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from workers.errors import StorageError
from workers.storage.sql.direct import Executor

_PLACE: Final = text(
    "SELECT system_identifier, d.oid, (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('workers_queues')),"
    " current_setting('client_encoding') <> 'SQL_ASCII'"
    " FROM pg_control_system(), pg_database d WHERE datname = current_database()"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The database and its server, whatever their address; where the tables are that it finds; how it has texts."""

    database: tuple[object, object]
    schema: object
    is_encoded: bool


def place_of(connection: Executor) -> Place:
    """Ask what the session works on."""
    system, database, schema, is_encoded = connection.execute(_PLACE).one()
    return Place((system, database), schema, is_encoded)


def check(connection: Connection, ours: Place, database: str) -> None:
    """Refuse a caller's connection whose jobs would go elsewhere than ours, or be other ones.

    Raises:
        StorageError: see there.
    """
    theirs = place_of(connection) if connection.dialect.name == "postgresql" else None
    if theirs is None or theirs.database != ours.database:
        raise StorageError(f"`connection` belongs to another database than the jobs; pass one of {database}")
    if theirs.schema != ours.schema:
        raise StorageError(f"`connection` does not find the tables of {database}; its `search_path` leads elsewhere")
    if not theirs.is_encoded:
        raise StorageError("`connection` has `client_encoding = SQL_ASCII`, in which texts are bytes; set it to UTF8")
