"""Lists in statements."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, MetaData, Table, Text, create_engine, delete, insert, select
from sqlalchemy.dialects import postgresql

from db import among

_TABLE = Table("names", MetaData(), Column("name", Text, primary_key=True))
ODD = ["", "'", '"', "a,b", "{x}", "[1]", "null", "7", "ä\u202e", "\\", "%(names)s", ":names"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return "sqlite://"
    return str(request.getfixturevalue("postgres_url")).replace("postgresql://", "postgresql+psycopg://")


def test_it_finds_exactly_what_is_listed(url: str) -> None:
    engine = create_engine(url)
    with engine.connect() as connection:
        _TABLE.create(connection)
        connection.execute(insert(_TABLE), [{"name": name} for name in [*ODD, "other"]])
        listed = select(_TABLE.c.name).where(among(_TABLE.c.name, "names"))
        assert set(connection.execute(listed, {"names": [*ODD, "missing"]}).scalars()) == set(ODD)
        assert connection.execute(listed, {"names": []}).all() == []
        gone = connection.execute(delete(_TABLE).where(among(_TABLE.c.name, "names")), {"names": ODD[:3]})
        assert gone.rowcount == 3
        connection.rollback()
    engine.dispose()


def test_on_postgresql_the_text_is_the_same_for_every_length() -> None:
    """So that it is prepared once."""
    statement = select(_TABLE.c.name).where(among(_TABLE.c.name, "names"))
    text = str(statement.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]  # it has no types
    assert "POSTCOMPILE" not in text


def test_on_sqlite_each_element_is_looked_up() -> None:
    """Also where the answer is to be in the order of the index, which makes a scan tempting."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        _TABLE.create(connection)
        listed = select(_TABLE.c.name).where(among(_TABLE.c.name, "names")).order_by(_TABLE.c.name)
        text = str(listed.compile(connection)).replace("(__[POSTCOMPILE_names])", "('a', 'b')")
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").scalars("detail").all()
    engine.dispose()
    assert [step for step in plan if step.startswith("SEARCH")], plan


def test_statements_about_other_columns_are_others() -> None:
    """SQLAlchemy keeps composed statements by what they are made of."""
    other = Table("others", MetaData(), Column("name", Text), Column("alias", Text))
    first, second = (select(other.c.name).where(among(column, "texts")) for column in (other.c.name, other.c.alias))
    assert first._generate_cache_key() != second._generate_cache_key()
