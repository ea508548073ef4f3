"""Adopting servers that were registered before rows said which of our keys they know."""

from __future__ import annotations

from datetime import UTC, datetime

from alembic import command
from sqlalchemy import DateTime, bindparam, select, text

from db import Database, Server
from db.engines import migration_engine
from db.migrate import _config, upgrade
from db.url import parse_url

NOW = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)
INSERT = text(
    """INSERT INTO server_registry (id, url, public_key, encryption_public_key, last_seen, created_at, updated_at,
    is_healthy) VALUES (:id, :url, :id, :id, :now, :now, :now, true)"""
).bindparams(bindparam("now", type_=DateTime))


def add(url: str, name: str, *, before: str | None = None) -> None:
    """A row that names no column of ours, by itself or with the schema from *before*."""
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        if before is not None:
            command.upgrade(_config(connection), before)
        connection.execute(INSERT, {"id": name, "url": f"https://{name}.example", "now": NOW})
    engine.dispose()


async def test_servers_that_name_no_key_of_ours_are_kept(database_url: str) -> None:
    """Registered before the upgrade, or after it by the original implementation: no key is the older one."""
    add(database_url, "a", before="0009")
    upgrade(database_url)
    add(database_url, "b")
    database = Database(database_url)
    async with database.read() as session:
        servers = list((await session.execute(select(Server).order_by("url"))).scalars())
    await database.close()

    assert [server.id for server in servers] == ["a", "b"]
    assert {(each.knows_key, each.rotation_tried_at, each.rotation_problem) for each in servers} == {(None, None, None)}
