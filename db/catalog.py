"""Compare what a database really has with what the models declare: a version number alone may not be true."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Set
from typing import Final

from sqlalchemy import Connection, MetaData, bindparam, text

# SQLAlchemy's inspector finds the same, with a statement per table on SQLite and three on PostgreSQL.
_COLUMNS: Final = {
    "sqlite": text(
        "SELECT lower(t.name), lower(c.name) FROM sqlite_schema AS t JOIN pragma_table_xinfo(t.name) AS c"
        " WHERE t.type IN ('table', 'view') AND lower(t.name) IN :tables"
    ).bindparams(bindparam("tables", expanding=True)),
    # Not information_schema: it hides tables that we may not read, and they would be told as missing.
    "postgresql": text(
        "SELECT t.relname::text, c.attname::text FROM pg_catalog.pg_class AS t"
        " JOIN pg_catalog.pg_attribute AS c ON c.attrelid = t.oid AND c.attnum > 0 AND NOT c.attisdropped"
        " WHERE t.relname IN :tables AND t.relkind IN ('r', 'p', 'f', 'v', 'm')"
        " AND pg_catalog.pg_table_is_visible(t.oid)"
    ).bindparams(bindparam("tables", expanding=True)),
}

_DENIED: Final = text(
    "SELECT r.name, t.relname::text FROM pg_catalog.pg_class AS t"
    " CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS r(name)"
    " WHERE t.relname IN :tables AND t.relkind IN ('r', 'p', 'f', 'v') AND pg_catalog.pg_table_is_visible(t.oid)"
    " AND NOT CASE r.name WHEN 'DELETE' THEN has_table_privilege(t.oid, r.name)"
    " ELSE has_any_column_privilege(t.oid, r.name) END"
).bindparams(bindparam("tables", expanding=True))


def columns(connection: Connection, tables: Collection[str]) -> Mapping[str, Set[str]]:
    """Return the columns of those of these tables, or views in their place, that `connection` sees. One statement."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for table, column in connection.execute(_COLUMNS[connection.dialect.name], {"tables": list(tables)}):
        found[table].add(column)
    return found


def missing(connection: Connection, metadata: MetaData) -> tuple[str, ...]:
    """Name what `metadata` declares and the database lacks: `table` for a whole one, else `table.column`; sorted.

    One statement, which reads the catalog alone. Types, constraints, indexes and triggers are not compared.
    """
    found = columns(connection, metadata.tables.keys())
    return tuple(
        sorted(
            name
            for table in metadata.tables.values()
            for name in (
                [f"{table.name}.{column.name}" for column in table.columns if column.name not in found[table.name]]
                if table.name in found
                else [table.name]
            )
        )
    )


def denied(connection: Connection, tables: Collection[str]) -> tuple[str, ...]:
    """Name what the connection's user may not do with these tables, as `INSERT on follows`; sorted.

    Rights on sequences are not looked at. On SQLite there are none but the file's.
    """
    if connection.dialect.name != "postgresql":
        return ()
    return tuple(
        sorted(f"{right} on {table}" for right, table in connection.execute(_DENIED, {"tables": list(tables)}))
    )
