"""A PostgreSQL database whose settings change how values are written and read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy import Engine, make_url, select, text
from sqlmodel import col

from db import BlacklistedServer, Database
from db.engines import migration_engine, reading_engine, writing_engine
from db.migrate import upgrade
from db.url import parse_url

ODD: Final = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "client_encoding": "SQL_ASCII",
    "DateStyle": "SQL, DMY",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "IntervalStyle": "sql_standard",
    "standard_conforming_strings": "off",
    "TimeZone": "Asia/Kathmandu",
}

MOMENT: Final = datetime(2025, 2, 1, 23, 59, 59, 123456, tzinfo=UTC)
READ: Final = text(
    "SELECT CAST(:bytes AS bytea[]) AS bytes, CAST(:texts AS text[]) AS texts, CAST(:moment AS timestamptz) AS moment,"
    " CAST(:time AS interval) AS time, CAST(:number AS float) AS number, 'a\\b' AS constant,"
    " CAST(CAST(:moment AS timestamptz) AS date) AS day, current_setting('transaction_isolation') AS isolation"
)
VALUES: Final = {
    "bytes": [b"\x01\\x", b"'"],
    "texts": ["ü", None],
    "moment": MOMENT,
    "time": timedelta(days=-1, seconds=5),
    "number": 0.1 + 0.2,
}
MEANT: Final = {**VALUES, "constant": "a\\b", "day": MOMENT.date(), "isolation": "read committed"}


@pytest.fixture
def odd_url(postgres_url: str) -> str:
    """A database with all of them, and our tables."""
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as admin:
        name = Identifier(make_url(postgres_url).database or "")
        for setting, value in ODD.items():
            admin.execute(SQL("ALTER DATABASE {} SET {} = {}").format(name, Identifier(setting), value))
    upgrade(postgres_url)
    return postgres_url


async def test_no_setting_changes_what_is_kept(odd_url: str) -> None:
    """What was written is what is read, by writer and reader."""
    database = Database(odd_url)
    async with database.transaction() as session:
        session.add(BlacklistedServer(id="a", server_url="https://a.example", created_at=MOMENT, reason="ü \\ '"))
        assert dict((await session.execute(READ, VALUES)).mappings().one()) == MEANT
    async with database.read() as session:
        [row] = (await session.execute(select(BlacklistedServer).where(col(BlacklistedServer.id) == "a"))).scalars()
        assert (row.created_at, row.reason) == (MOMENT, "ü \\ '")
        assert dict((await session.execute(READ, VALUES)).mappings().one()) == MEANT
    await database.close()


@pytest.fixture(params=[writing_engine, migration_engine, reading_engine], ids=lambda make: make.__name__)
def engine(odd_url: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.param(parse_url(odd_url))
    yield engine
    engine.dispose()


def test_every_engine_has_settings_of_its_own(engine: Engine) -> None:
    """So it is for plain code, migrations and long reads, also in the sessions that follow a rollback."""
    for _ in range(2):
        with engine.connect() as connection:
            assert dict(connection.execute(READ, VALUES).mappings().one()) == MEANT
            connection.rollback()
