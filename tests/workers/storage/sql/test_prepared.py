"""Statements that run often on PostgreSQL are answered by libpq alone as psycopg would have answered them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Final

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.postgres.driver.direct import PostgresDirect, driver_of

OFTEN: Final = 8
EVERYTHING: Final = text(
    "SELECT CAST(:many AS text[]) = CAST(:same AS text[]) AS equal,"
    " array_length(CAST(:numbers AS bigint[]), 1) AS count,"
    " (CAST(:datas AS bytea[]))[2] AS data, CAST(:number AS bigint) AS number, CAST(:text AS text) AS text,"
    " CAST(:flag AS boolean) AS flag, CAST(:nothing AS bytea) AS nothing, CAST(:small AS smallint) AS small"
)
PREPARED: Final = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'workers%'")


@pytest.fixture
def database() -> str:
    return "postgres"


@pytest.fixture
def connection(own_engine: Engine) -> Iterator[Connection]:
    with own_engine.connect() as connection:
        yield connection


def prepared(connection: Connection) -> int:
    return int(PostgresDirect(connection, alone=True).execute(PREPARED).scalar_one())


@pytest.mark.parametrize(
    "said", ["", "x", "{a,b}", 'a "quoted" \\ b', "NULL", "null", " a ", "%s", ":x $1", "ü\U0001f600"]
)
def test_values_arrive_as_they_are_and_come_back(connection: Connection, said: str) -> None:
    """Whatever is in a text or in bytes, in an array or alone, is no syntax."""
    data = bytes(range(256)) + said.encode()
    values: dict[str, object] = {
        "many": [said, None, "b"],
        "same": [said, None, "b"],
        "numbers": [1, -(1 << 62)],
        "datas": [b"", data],
        "number": -(1 << 62),
        "text": said,
        "flag": False,
        "nothing": None,
        "small": -2,
    }
    for _ in range(OFTEN):
        row = PostgresDirect(connection, alone=True).execute(EVERYTHING, values).one()
        assert tuple(row) == (True, 2, data, -(1 << 62), said, False, None, -2)
        assert row.flag is False
    assert prepared(connection) == 1


class Urgency(IntEnum):
    LOW = 7


class Color(StrEnum):
    RED = "red"


def test_members_of_enumerations_arrive_as_their_values(connection: Connection) -> None:
    """As a priority or a name may be one, alone and in an array."""
    statement = text(
        "SELECT CAST(:number AS integer), CAST(:text AS text), (CAST(:numbers AS integer[]))[2],"
        " (CAST(:texts AS text[]))[2]"
    )
    values = {
        "number": Urgency.LOW,
        "text": Color.RED,
        "numbers": [None, Urgency.LOW],
        "texts": [None, Color.RED],
    }
    for _ in range(OFTEN):
        row = PostgresDirect(connection, alone=True).execute(statement, values).one()
        assert tuple(row) == (7, "red", 7, "red")


def test_a_change_tells_how_many_rows_it_changed(connection: Connection) -> None:
    direct = PostgresDirect(connection, alone=True)
    for count in range(OFTEN):
        added = direct.execute(
            text("INSERT INTO workers_queues (name) SELECT unnest(CAST(:names AS text[]))"),
            {"names": [f"{count}-{number}" for number in range(3)]},
        )
        assert added.rowcount == 3
    assert prepared(connection) == 1


@pytest.mark.parametrize("statement", ["SELECT now() AS at", "SELECT CAST(:x AS text), :x + 1", "SELECT 1.5 AS number"])
def test_what_it_cannot_read_is_left_to_psycopg(connection: Connection, statement: str) -> None:
    """Neither columns of other types nor parameters of two types are misread."""
    for _ in range(OFTEN):
        answered = PostgresDirect(connection, alone=True).execute(text(statement), {"x": 1}).one()
        assert answered[0] is not None
        assert not isinstance(answered[0], bytes)


def test_an_error_is_the_one_that_psycopg_would_raise(connection: Connection) -> None:
    """The connection goes on afterwards."""
    halve = text("SELECT 1 / CAST(:by AS integer) AS half")
    direct = PostgresDirect(connection, alone=True)
    for _ in range(OFTEN):
        direct.execute(halve, {"by": 1})
    with pytest.raises(DBAPIError) as caught:
        direct.execute(halve, {"by": 0})
    assert isinstance(caught.value.orig, psycopg.errors.DivisionByZero)
    assert direct.execute(halve, {"by": 1}).scalar_one() == 1


def test_a_statement_that_somebody_dropped_is_carried_out_all_the_same(connection: Connection) -> None:
    """As by a proxy that resets the sessions it shares."""
    direct = PostgresDirect(connection, alone=True)
    for count in range(3 * OFTEN):
        if count == OFTEN:
            assert prepared(connection) == 1
            connection.connection.cursor().execute("DEALLOCATE ALL")
        assert direct.execute(text("SELECT CAST(:x AS text) AS x"), {"x": "a"}).scalar_one() == "a"


def test_a_connection_that_is_to_prepare_nothing_prepares_nothing(connection: Connection) -> None:
    driver_of(connection).prepare_threshold = None
    for _ in range(OFTEN):
        PostgresDirect(connection, alone=True).execute(text("SELECT 1 AS one"))
    assert prepared(connection) == 0


def test_in_a_transaction_nothing_is_prepared_that_could_break_it(connection: Connection) -> None:
    """A statement that cannot be prepared would end the transaction."""
    with connection.begin():
        direct = PostgresDirect(connection, alone=False)
        for _ in range(OFTEN):
            assert tuple(direct.execute(text("SELECT CAST(:x AS text), :x + 1"), {"x": 1}).one()) == ("1", 2)
    connection.commit()
    assert prepared(connection) == 0
