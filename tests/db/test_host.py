"""The host application's tables: made where there is no host, never touched where there is one, and looked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, inspect

from db import Database, HostTablesError, Post, User, create_host_tables
from db.engines import migration_engine
from db.host import columns_of_host, missing_of_host
from db.migrate import upgrade
from db.url import parse_url, sqlite_file
from tests.db.original import create_original


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """On an empty database."""
    made = migration_engine(parse_url(database_url))
    yield made
    made.dispose()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def missing(engine: Engine) -> tuple[str, ...]:
    with engine.begin() as connection:
        return missing_of_host(connection)


def test_an_upgrade_makes_them_only_where_it_is_told_to(database_url: str, engine: Engine) -> None:
    """And says which it made; a second one makes nothing."""
    assert upgrade(database_url) == ()
    assert missing(engine) == ("blocks", "posts", "user")
    assert set(upgrade(database_url, host_tables=True)) == {"blocks", "posts", "user"}
    assert missing(engine) == ()
    assert upgrade(database_url, host_tables=True) == ()


def test_a_hosts_own_table_stays_as_it_is(database_url: str, engine: Engine) -> None:
    """What it lacks is missing still, and named; the others are made beside it, and refer to it."""
    execute(
        engine,
        'CREATE TABLE "user" (id text PRIMARY KEY, name text NOT NULL)',
        "INSERT INTO \"user\" VALUES ('1', 'A')",
    )
    assert set(upgrade(database_url, host_tables=True)) == {"blocks", "posts"}
    with engine.begin() as connection:
        assert [each["name"] for each in inspect(connection).get_columns("user")] == ["id", "name"]
        assert connection.exec_driver_sql('SELECT * FROM "user"').all() == [("1", "A")]
        assert columns_of_host(connection, "user") == ("name",)
    assert missing(engine) == ("user.is_private", "user.post_propagation_policy")


def test_columns_that_are_never_used_may_be_missing(engine: Engine) -> None:
    """A host need not keep when somebody was blocked, nor an id of that."""
    with engine.begin() as connection:
        create_host_tables(connection)
    execute(engine, "DROP TABLE blocks", "CREATE TABLE blocks (blocker_id text, blocked_user_id text)")
    assert missing(engine) == ()


def test_a_host_that_is_in_the_way_is_told_and_nothing_is_changed(postgres_url: str) -> None:
    """Ours refer to its users by text: with ids of another type PostgreSQL makes no such table."""
    engine = migration_engine(parse_url(postgres_url))
    execute(engine, 'CREATE TABLE "user" (id uuid PRIMARY KEY)')
    with pytest.raises(HostTablesError, match=r"the host's own \(DatatypeMismatch\); nothing was changed"):
        upgrade(postgres_url, host_tables=True)
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == ["user"]
    engine.dispose()


def test_an_adopted_nodes_users_are_its_own(postgres_url: str) -> None:
    """The original's database gets what it has not, beside its users."""
    engine = migration_engine(parse_url(postgres_url))
    create_original(engine)
    assert set(upgrade(postgres_url, host_tables=True)) == {"blocks", "posts"}
    with engine.begin() as connection:
        assert connection.exec_driver_sql('SELECT name FROM "user"').scalar_one() == "Alice"
        assert columns_of_host(connection, "user") == ("name",)
    engine.dispose()


async def test_the_minimal_tables_take_users_and_posts(database_url: str) -> None:
    upgrade(database_url, host_tables=True)
    database = Database(database_url)
    async with database.transaction() as session:
        session.add(User(id="alice"))
    async with database.read() as session:
        found = await session.get(User, "alice")
        assert found is not None
        assert (found.is_private, found.post_propagation_policy) == (False, "all")
        assert await session.get(Post, "p") is None
    await database.close()


def test_the_file_of_a_url(tmp_path: object) -> None:
    """None where there is none."""
    assert str(sqlite_file(f"sqlite:///{tmp_path}/new.db")) == f"{tmp_path}/new.db"
    assert sqlite_file("postgresql://localhost/x") is None
