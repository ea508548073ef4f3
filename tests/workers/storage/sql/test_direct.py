"""Statements on the driver's own connection are answered as SQLAlchemy would have answered them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from tests.workers.storage.sql.steps import on_postgres
from workers.storage.sql.direct import Executor, plain
from workers.storage.sql.postgres.driver.direct import PostgresDirect
from workers.storage.sql.rows import expanding
from workers.storage.sql.sqlite.driver.connections import SqliteDirect, connect

_ADD = text("INSERT INTO things (id, name) VALUES (:id, :name)")
_SOME = expanding("SELECT id, name FROM things WHERE id IN :ids AND name <> :name ORDER BY id", "ids")
_RENAME = expanding("UPDATE things SET name = :name WHERE id IN :ids RETURNING id", "ids")


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    path: Path = tmp_path_factory.mktemp("direct") / "things.db"
    with connect(str(path), timedelta(seconds=1)) as connection:
        connection.execute(text("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT NOT NULL)"))
        connection.commit()
        yield connection


@pytest.fixture
def things(connection: Connection) -> Iterator[Connection]:
    """Twenty of them, which nothing that a test does outlasts."""
    with connection.begin() as transaction:
        connection.exec_driver_sql("BEGIN")
        SqliteDirect(connection).execute(_ADD, [{"id": number, "name": f"n{number}"} for number in range(20)])
        yield connection
        transaction.rollback()


@given(ids=st.lists(st.integers(0, 25), max_size=20))
def test_lists_of_every_length(connection: Connection, ids: list[int]) -> None:
    """An empty list matches nothing, and a list that is filled up no more than itself."""
    with connection.begin() as transaction:
        connection.exec_driver_sql("BEGIN")
        SqliteDirect(connection).execute(_ADD, [{"id": number, "name": f"n{number}"} for number in range(20)])
        values = {"ids": ids, "name": "n3"}
        found = SqliteDirect(connection).execute(_SOME, values).all()
        assert found == connection.execute(_SOME, values).all()
        renamed = SqliteDirect(connection).execute(_RENAME, {"ids": ids, "name": "x"})
        assert sorted(renamed.scalars()) == sorted({number for number in ids if number < 20})
        transaction.rollback()


@on_postgres
def test_arrays_of_every_length(own_engine: Engine) -> None:
    """An array of one element goes to PostgreSQL as that element, and arrives as the array that it is."""
    both = text("SELECT CAST(:names AS text[]) AS names, CAST(:numbers AS bigint[]) AS numbers, :plain AS plain")
    with own_engine.connect() as connection:
        for names, numbers in (([], []), (["a%"], [1]), ([None], [None]), (["{,}"], [1, 2]), (["a", None], [1 << 40])):
            values = {"names": names, "numbers": numbers, "plain": "x"}
            found = PostgresDirect(connection, alone=True).execute(both, values).one()
            assert tuple(found) == (names, numbers, "x")


@on_postgres
def test_a_text_with_nul_is_refused_however_often(own_engine: Engine) -> None:
    """Libpq would take what is before it for the whole."""
    both = text("SELECT cardinality(CAST(:names AS text[])), CAST(:plain AS text)")
    with own_engine.connect() as connection:
        for names, plain in [(["a", "b"], "c")] * 10:
            assert tuple(PostgresDirect(connection, alone=True).execute(both, {"names": names, "plain": plain}).one())
        for names, plain in ((["a", "b\0"], "c"), (["a", "b"], "c\0d")):
            with pytest.raises(DBAPIError):
                PostgresDirect(connection, alone=True).execute(both, {"names": names, "plain": plain})


@on_postgres
def test_a_connection_that_broke_is_given_up(own_engine: Engine, admin: psycopg.Connection) -> None:
    """The pool gets another one in its place, and who asked is told."""
    which = text("SELECT pg_backend_pid()")
    with own_engine.connect() as connection:
        direct = PostgresDirect(connection, alone=True)
        pid = direct.execute(which).scalar()
        admin.execute("SELECT pg_terminate_backend(%s, 30000)", (pid,))
        with pytest.raises(DBAPIError):
            direct.execute(which)
        assert connection.invalidated
    with own_engine.connect() as connection:
        assert PostgresDirect(connection, alone=False).execute(which).scalar() != pid


def test_answers_look_alike(things: Connection) -> None:
    """Whoever reads a row by place, by name or as a mapping need not know who carried the statement out."""
    one = text("SELECT id, name AS called FROM things WHERE id = :id")
    answers = [_looks(executor, one) for executor in (SqliteDirect(things), things)]
    assert answers[0] == answers[1]


def _looks(executor: Executor, one: TextClause) -> list[object]:
    found = executor.execute(one, {"id": 7}).one()
    changed = executor.execute(text("UPDATE things SET name = 'y' WHERE id < 5")).rowcount
    return [
        tuple(found),
        found.called,
        [dict(row) for row in executor.execute(one, {"id": 7}).mappings()],
        executor.execute(one, {"id": 99}).first(),
        executor.execute(one, {"id": 99}).scalar(),
        executor.execute(one, {"id": 7}).scalar_one(),
        [called for _, called in executor.execute(one, {"id": 7})],
        changed,
        executor.dialect.name,
    ]


def test_a_statement_is_over_when_it_was_answered(things: Connection) -> None:
    """No row is left unread in the driver, where it would hold back checkpoints and the end of a transaction."""
    answer = SqliteDirect(things).execute(text("SELECT id FROM things ORDER BY id"))
    SqliteDirect(things).execute(text("DELETE FROM things"))
    assert answer.scalars().all() == list(range(20))


def test_what_the_database_refuses_is_told_without_values(things: Connection) -> None:
    """As SQLAlchemy's error, which the storage translates; a payload is in none."""
    with pytest.raises(DBAPIError) as caught:
        SqliteDirect(things).execute(_ADD, {"id": 1, "name": "a secret"})
    assert getattr(caught.value.orig, "sqlite_errorname", None) == "SQLITE_CONSTRAINT_PRIMARYKEY"
    assert "secret" not in str(caught.value)
    assert plain(SqliteDirect(things)) is plain(things) is things
