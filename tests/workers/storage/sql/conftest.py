"""A database of the test's own, of each kind that `SqlStorage` knows, and who works on it.

A test that is about one of them says so by `on_sqlite` or `on_postgres`, a file by a `database` fixture of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.workers.storage.sql.steps import connected
from workers.storage.sql import SqlStorage
from workers.storage.sql.postgres.target import PostgresTarget
from workers.storage.sql.sqlite.changes import watcher


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """Which database it is."""
    return str(request.param)


@pytest.fixture
def empty_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables; for SQLite a file that is not there yet."""
    if database == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def url(empty_url: str) -> str:
    """A database with the tables."""
    await SqlStorage(empty_url).migrate()
    return empty_url


@pytest.fixture
async def storage(url: str) -> AsyncIterator[SqlStorage]:
    async with connected(SqlStorage(url)) as storage:
        yield storage


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """The application's own engine."""
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def own_engine(url: str) -> Iterator[Engine]:
    """One that makes connections as `SqlStorage` does on PostgreSQL."""
    engine = PostgresTarget(make_url(url), timedelta(seconds=10)).engine()
    yield engine
    engine.dispose()


@pytest.fixture
def outsider(empty_url: str) -> Iterator[Engine]:
    """Somebody else's hand in the database, whose every statement is committed at once."""
    engine = create_engine(empty_url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the PostgreSQL database that nobody else uses."""
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


@pytest.fixture
def no_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that tells nobody of writes to a file."""
    monkeypatch.setattr(watcher, "sys", SimpleNamespace(platform="plan9"))


@pytest.fixture
def no_watcher(no_inotify: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's watcher looks once as it starts, and then never again."""
    monkeypatch.setattr(watcher, "POLL", timedelta(hours=1))
