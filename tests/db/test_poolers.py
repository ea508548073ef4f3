"""PostgreSQL behind a PgBouncer: one that lends sessions for as long as a client stays, and ones that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Final

import psycopg
import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import OperationalError

from db import BlacklistRevision, Database, DatabaseUrlError
from db.engines import migration_engine, reading_engine, writing_engine
from db.errors import is_outage
from db.migrate import upgrade
from db.poolers import LentSessionsError, _are_shared
from db.url import parse_url
from tests.bouncer import bouncer, busy, through

REFUSED: Final = r"^the database postgresql://127.0.0.1:\d+/\w+ is behind a pool .* `pool_mode = session`, or"


@pytest.fixture(scope="module")
def by_session(postgres_server: str) -> Iterator[int]:
    with bouncer(postgres_server, "session") as port:
        yield port


@pytest.fixture(scope="module", params=["transaction", "statement"])
def lent(postgres_server: str, request: pytest.FixtureRequest) -> Iterator[int]:
    with bouncer(postgres_server, request.param) as port:
        yield port


async def test_sessions_are_as_without_it(by_session: int, postgres_url: str) -> None:
    """It is upgraded, written and read through all the ways there are."""
    url = through(by_session, postgres_url)
    upgrade(url)
    database = Database(url)
    async with database.transaction() as session:
        await session.execute(text("DELETE FROM server_links"))
    assert await database.transact(lambda connection: connection.execute(text("SELECT 1")).scalar()) == 1
    assert [tuple(row) for row in await database.alone("SELECT 1 AS one", {})] == [(1,)]
    async with database.read() as session:
        assert await session.get(BlacklistRevision, 1) is not None
    await database.close()


@pytest.mark.parametrize("make", [writing_engine, migration_engine, reading_engine], ids=lambda make: make.__name__)
def test_lent_sessions_are_refused_by_every_engine(lent: int, postgres_url: str, make: Callable[..., Engine]) -> None:
    """At its first connection, each time, in one line that says what to do; the password is not in it."""
    url = through(lent, make_url(postgres_url).set(password="s3cret").render_as_string(hide_password=False))
    engine = make(parse_url(url))
    for _ in range(2):
        with pytest.raises(LentSessionsError, match=REFUSED) as refused:
            engine.connect()
        assert "s3cret" not in str(refused.value)
    engine.dispose()


@pytest.mark.parametrize("order", ["last", "first"])
def test_a_pool_in_which_each_gets_its_own_again_is_found_out(
    postgres_server: str, postgres_url: str, order: str
) -> None:
    """Others have put its sessions into an order in which two clients would always get the same, each its own."""
    with (
        bouncer(postgres_server, "transaction", server_round_robin=int(order == "first")) as port,
        ExitStack() as stack,
    ):
        url = make_url(through(port, postgres_url)).set(drivername="postgresql").render_as_string(hide_password=False)
        one, other, third = (stack.enter_context(psycopg.connect(url)) for _ in range(3))
        first = one.execute("SELECT pg_backend_pid()").fetchone()
        assert first is not None
        one.rollback()
        third.execute("SELECT 1")
        other.execute("SELECT 1")
        for each in (third, other) if order == "last" else (other, third):
            each.rollback()
        assert _are_shared(first[0], one, other)


async def test_lent_sessions_are_refused_to_tasks(lent: int, postgres_url: str) -> None:
    """Whichever way is asked first, with nothing left open; it is a fault of the URL."""
    database = Database(through(lent, postgres_url))
    with pytest.raises(DatabaseUrlError, match=REFUSED):
        await database.transact(lambda _: None)
    with pytest.raises(DatabaseUrlError, match=REFUSED):
        await database.alone("SELECT 1", {})
    with pytest.raises(DatabaseUrlError, match=REFUSED):
        async with database.read() as session:
            await session.connection()
    await database.close()


def test_an_upgrade_leaves_nothing(lent: int, postgres_url: str) -> None:
    """Neither tables nor settings, in sessions that are the next client's."""
    url = through(lent, postgres_url)
    with pytest.raises(LentSessionsError, match=REFUSED):
        upgrade(url)
    with closing(psycopg.connect(url.replace("+psycopg", ""), autocommit=True)) as other:
        settings = other.execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()
        tables = other.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert {name for (name,) in settings} <= {"application_name", "client_encoding"}  # the pool's own doing
    assert tables == (0,)


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_turns_are_seen_through(postgres_server: str, postgres_url: str, clients: int) -> None:
    """A pool may lend the session that has rested the longest, so that two clients get two of them in turn."""
    with bouncer(postgres_server, "transaction", server_round_robin=1) as port, busy(port, postgres_url, clients):
        engine = writing_engine(parse_url(through(port, postgres_url)))
        for _ in range(4):
            with pytest.raises(LentSessionsError, match=REFUSED):
                engine.connect()
        engine.dispose()


@pytest.mark.parametrize("held", [1, 0], ids=["for the first connection", "for the second connection"])
def test_a_full_pool_is_an_outage(postgres_server: str, postgres_url: str, held: int) -> None:
    """Whoever finds no room in it has seen nothing of how it lends; later there is some."""
    with bouncer(postgres_server, "session", default_pool_size=1, query_wait_timeout=1) as port:
        engine = writing_engine(parse_url(through(port, postgres_url)))
        with busy(port, postgres_url, held), pytest.raises(OperationalError) as failed:
            engine.connect()
        assert is_outage(failed.value)
        engine.dispose()


async def test_a_full_pool_is_an_outage_to_tasks(postgres_server: str, postgres_url: str) -> None:
    """Whatever they would have it do."""
    with bouncer(postgres_server, "session", default_pool_size=1, query_wait_timeout=1) as port:
        database = Database(through(port, postgres_url))
        with busy(port, postgres_url, 1), pytest.raises(OperationalError) as failed:
            async with database.read() as session:
                await session.connection()
        assert is_outage(failed.value)
        await database.close()
