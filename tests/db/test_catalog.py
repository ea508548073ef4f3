"""What a database lacks of the models' tables and columns, and which errors of a statement mean so."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError

from db import Database, FederationTable, HostTable
from db.catalog import missing
from db.engines import migration_engine
from db.errors import is_outage
from db.migrate import upgrade
from db.url import parse_url
from tests.servers import free_port


def lacks(url: str, *statements: str) -> tuple[str, ...]:
    """What of ours a migrated database lacks after these statements."""
    upgrade(url)
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    with engine.begin() as connection:
        found = missing(connection, FederationTable.metadata)
    engine.dispose()
    return found


@pytest.mark.parametrize(
    ("statements", "names"),
    [
        ((), ()),
        (("DROP TABLE server_links",), ("server_links",)),
        (("ALTER TABLE delivery_jobs DROP COLUMN holds",), ("delivery_jobs.holds",)),
        (
            ("DROP TABLE server_links", "ALTER TABLE delivery_jobs RENAME COLUMN holds TO held"),
            ("delivery_jobs.holds", "server_links"),
        ),
        (("ALTER TABLE follows RENAME TO theirs", "CREATE VIEW follows AS SELECT * FROM theirs"), ()),
        (("ALTER TABLE follows ADD COLUMN colour text", "CREATE TABLE others (id text)"), ()),
    ],
    ids=["nothing", "table", "column", "both", "a view in its place", "more than ours"],
)
def test_what_is_missing_is_named(database_url: str, statements: tuple[str, ...], names: tuple[str, ...]) -> None:
    """A table that is gone by its own name alone; what others added is no matter."""
    assert lacks(database_url, *statements) == names


def test_names_of_sqlite_are_the_same_in_any_case(sqlite_url: str) -> None:
    assert lacks(sqlite_url, "ALTER TABLE follows RENAME TO f", "ALTER TABLE f RENAME TO FOLLOWS") == ()


def test_what_a_connection_of_postgres_does_not_see_is_missing(postgres_url: str) -> None:
    """A table in a schema that is not on the search path, though it is there."""
    assert lacks(postgres_url, "CREATE SCHEMA aside", "ALTER TABLE server_links SET SCHEMA aside") == ("server_links",)


async def test_it_is_one_statement(database: Database) -> None:
    """Probes ask for it once a second."""
    statements: list[str] = []

    def look(connection: Connection) -> tuple[str, ...]:
        event.listen(connection, "before_cursor_execute", lambda *given: statements.append(given[2]))
        return missing(connection, HostTable.metadata)

    async with database.read() as session:
        connection = await session.connection()
        assert await connection.run_sync(look) == ("blocks", "posts", "user")
    assert len(statements) == 1


async def test_a_table_that_is_missing_is_no_outage(database: Database) -> None:
    """Nor is a column; on SQLite both come with the type of one."""
    for statement in ("SELECT 1 FROM nowhere", "SELECT nothing FROM follows"):
        async with database.read() as session:
            connection = await session.connection()
            with pytest.raises(SQLAlchemyError) as raised:
                await connection.exec_driver_sql(statement)
        assert not is_outage(raised.value)


async def test_a_database_that_cannot_be_asked_is_an_outage(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A server that is not there, a file that is a directory."""
    directory = tmp_path_factory.mktemp("no-file")
    for url in (f"postgresql://u@127.0.0.1:{free_port()}/x", f"sqlite:///{directory}"):
        database = Database(url)
        with pytest.raises(SQLAlchemyError) as raised:
            async with database.read() as session:
                await session.connection()
        await database.close()
        assert is_outage(raised.value)
