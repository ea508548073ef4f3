"""Database URLs: what is accepted, and what the refusals say."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import Database, DatabaseUrlError
from db.url import parse_url


@pytest.mark.parametrize(
    "scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg_async", "postgresql+asyncpg"]
)
def test_every_spelling_of_postgres_means_psycopg(scheme: str) -> None:
    """The driver is ours to choose; user, address, name and options are kept."""
    url = parse_url(f"{scheme}://u:p@h:5433/node?sslmode=require")
    assert url.render_as_string(hide_password=False) == "postgresql+psycopg://u:p@h:5433/node?sslmode=require"


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_every_spelling_of_sqlite_means_the_same_file(scheme: str, tmp_path: Path) -> None:
    """The driver in the URL does not matter."""
    assert parse_url(f"{scheme}:///{tmp_path}/x.db").database == f"{tmp_path}/x.db"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "not a plain file"),
        ("sqlite:///:memory:", "not a plain file"),
        ("sqlite:///file:x?mode=memory&uri=true", "not a plain file"),
        ("sqlite:////no/such/directory/x.db", "directory /no/such/directory .* does not exist"),
        ("mysql://h/x", "'mysql' is not supported"),
        ("", "cannot be parsed"),
        ("node.db", "cannot be parsed"),
        ("postgresql://u:hunter2@h:port/node", "cannot be parsed"),
        *(
            (f"postgresql://u:hunter2@h/node?{name}=hunter2", f"unknown option '{name}'; leave it out")
            for name in ("x", "self", "conninfo", "kwargs", "row_factory", "cursor_factory", "context", "autocommit")
        ),
        ("postgresql://u:hunter2@h/node?ssl_mode=require", "'ssl_mode'; leave it out, or write 'sslmode'$"),
        ("sqlite:////tmp/x.db?time_out=3", "'time_out'; leave it out, or write 'timeout'$"),
    ],
)
def test_other_urls_are_refused_with_a_reason(url: str, message: str) -> None:
    """The message says what is wrong and holds no password."""
    with pytest.raises(DatabaseUrlError, match=message) as caught:
        parse_url(url)
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_what_libpq_knows_may_be_in_the_url() -> None:
    """In the words of its own documentation."""
    options = "connect_timeout=3&application_name=node&options=-csearch_path%3Dours&target_session_attrs=read-write"
    assert len(parse_url(f"postgresql://h/node?{options}").query) == 4


async def test_repr_shows_the_address_and_no_password() -> None:
    """Neither the user information nor the query, where libpq takes a password too, is shown."""
    database = Database("postgresql://u:hunter2@h:5433/node?password=hunter3")
    assert repr(database) == "Database(postgresql://h:5433/node)"
    await database.close()
