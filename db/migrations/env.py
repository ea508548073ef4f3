"""Run by Alembic: migrate over the connection, and inside the transaction, that `db.migrate.upgrade` hands in."""

from __future__ import annotations

from alembic import context

from db.migrate import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
)
context.run_migrations()
