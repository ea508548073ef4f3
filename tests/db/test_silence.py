"""A PostgreSQL server that says nothing is not waited for without end, and work goes on over new connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Final

import pytest
from sqlalchemy import URL, Engine, make_url, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from db import Database, engines, silence
from db.engines import migration_engine, reading_engine, writing_engine
from db.errors import is_outage
from db.session import PlainDatabase
from db.silence import PlainConnection, ServerSilent, TaskConnection
from db.url import parse_url
from tests.patience import PATIENCE_SECONDS
from tests.relay import Relay
from tests.servers import postgres_process

SHORT: Final = timedelta(milliseconds=500)
LONGER: Final = timedelta(seconds=3)
ONE: Final = text("SELECT 1")


@pytest.fixture
async def relay(postgres_url: str) -> AsyncIterator[Relay]:
    async with Relay(postgres_url) as relay:
        yield relay


def be_silent_for(patch: pytest.MonkeyPatch, limit: timedelta) -> None:
    for kind in (PlainConnection, TaskConnection):
        patch.setattr(kind, "silence", limit)


async def in_transaction(database: Database) -> object:
    async with database.transaction() as session:
        return (await session.execute(ONE)).scalar_one()


async def in_read(database: Database) -> object:
    async with database.read() as session:
        return (await session.execute(ONE)).scalar_one()


async def in_transact(database: Database) -> object:
    return await database.transact(lambda connection: connection.execute(ONE).scalar_one())


async def in_rows(database: Database) -> object:
    return (await database.rows(select(text("1"))))[0][0]


async def alone(database: Database) -> object:
    return (await database.alone("SELECT 1", {}))[0][0]


@pytest.fixture(params=[in_transaction, in_read, in_transact, in_rows, alone], ids=lambda ask: ask.__name__)
def ask(request: pytest.FixtureRequest) -> Callable[[Database], Awaitable[object]]:
    asking: Callable[[Database], Awaitable[object]] = request.param
    return asking


async def test_a_statement_that_is_not_answered_fails_and_the_next_one_works(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Database], Awaitable[object]]
) -> None:
    """By name, as an outage; the next one goes over a new connection."""
    be_silent_for(monkeypatch, SHORT)
    monkeypatch.setattr(engines, "_PING_AFTER", timedelta(hours=1))
    database = Database(relay.url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(in_transact(database) for _ in range(3)))
        assert await ask(database) == 1
        relay.swallow()
        with pytest.raises(DBAPIError) as caught:
            await ask(database)
        assert isinstance(caught.value.orig, ServerSilent)
        assert is_outage(caught.value)
        assert await ask(database) == 1
    await database.close()


async def test_an_idle_connection_that_went_silent_is_replaced(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Database], Awaitable[object]]
) -> None:
    """Tried before it is used, it has less time than a statement, which does not notice."""
    monkeypatch.setattr(silence, "_SILENCE_OF_PING", SHORT)
    monkeypatch.setattr(engines, "_PING_AFTER", timedelta(0))
    monkeypatch.setattr("db.alone.TRIED_AFTER_SECONDS", 0.0)
    database = Database(relay.url)
    async with asyncio.timeout(silence.SILENCE.total_seconds()):
        assert await ask(database) == 1
        relay.swallow()
        assert await ask(database) == 1
    await database.close()


async def test_a_thread_does_not_wait_for_ever_either(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain code."""
    be_silent_for(monkeypatch, SHORT)
    database = PlainDatabase(relay.url)

    def in_thread() -> object:
        with database.transaction() as session:
            return session.execute(ONE).scalar_one()

    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await asyncio.to_thread(in_thread) == 1
        relay.swallow()
        with pytest.raises(OperationalError, match="the server has been silent for") as caught:
            await asyncio.to_thread(in_thread)
        assert isinstance(caught.value.orig, ServerSilent)
        assert await asyncio.to_thread(in_thread) == 1
    await asyncio.to_thread(database.close)


@pytest.mark.parametrize("at_leisure", [True, False])
async def test_a_read_may_take_as_long_as_it_needs_if_it_is_at_leisure(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, at_leisure: bool
) -> None:
    """The server is silent over a long query, as a frozen one is."""
    be_silent_for(monkeypatch, SHORT)
    engine = reading_engine(parse_url(postgres_url), at_leisure=at_leisure)

    def read_for_long() -> object:
        with engine.connect() as connection:
            return connection.execute(text(f"SELECT 1 FROM pg_sleep({4 * SHORT.total_seconds()})")).scalar_one()

    if at_leisure:
        assert await asyncio.to_thread(read_for_long) == 1
    else:
        with pytest.raises(OperationalError, match="silent"):
            await asyncio.to_thread(read_for_long)


async def test_a_slow_answer_is_waited_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the server may be silent, and is never silent for as long."""
    be_silent_for(monkeypatch, LONGER)
    database = Database(postgres_url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Rows so long that the server sends each at once.
        rows = await database.alone("SELECT repeat('x', 20000), pg_sleep(0.3) FROM generate_series(1, 15)", {})
    assert len(rows) == 15
    await database.close()


async def test_a_frozen_server_is_worked_with_again_when_it_thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is frozen nobody waits without end: neither for an answer nor to connect."""
    be_silent_for(monkeypatch, SHORT)
    with postgres_process() as server:
        database = Database(make_url(server.url).update_query_dict({"connect_timeout": "2"}).render_as_string(False))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await in_transact(database) == 1
            server.hang()
            try:
                for _ in range(2):  # an answer, a connection
                    with pytest.raises(OperationalError):
                        await in_transact(database)
            finally:
                server.thaw()
            be_silent_for(monkeypatch, silence.SILENCE)
            assert await in_transact(database) == 1
        await database.close()


@pytest.mark.parametrize("make", [writing_engine, migration_engine, reading_engine], ids=lambda make: make.__name__)
def test_libpq_knows_when_a_server_is_gone(postgres_url: str, make: Callable[[URL], Engine]) -> None:
    """What the URL says counts in place of ours."""
    url = parse_url(postgres_url)
    ours = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3", "tcp_user_timeout": "10000"}
    assert told(make(url)).items() >= ours.items()
    said = {"tcp_user_timeout": "7000", "connect_timeout": "9"}
    assert told(make(url.update_query_dict(said))).items() >= {**ours, **said}.items()


def told(engine: Engine) -> dict[str, str]:
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            return dict(driver.info.get_parameters())
    finally:
        engine.dispose()


async def test_a_transaction_that_lost_its_client_is_undone(postgres_url: str) -> None:
    """By the server, after a minute, so that its locks are not held for hours."""
    show = text("SHOW idle_in_transaction_session_timeout")
    database = Database(postgres_url)
    assert await database.transact(lambda connection: connection.execute(show).scalar_one()) == "1min"
    await database.close()
    plain = PlainDatabase(postgres_url)
    with plain.transaction() as session:
        assert session.execute(show).scalar_one() == "1min"
    plain.close()
