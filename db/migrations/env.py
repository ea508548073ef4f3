"""Run by Alembic: migrate over the connection, and inside the transaction, that `db.migrate.upgrade` hands in."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # A host application may keep its own Alembic history in the same database.
    version_table="federation_alembic_version",
)
context.run_migrations()
