"""A node with vector A's keys on a fresh SQLite database, and a peer with vector B's on loopback."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis

from db import Database
from db.engines import migration_engine
from db.migrate import upgrade
from db.url import parse_url
from federation.base.settings.settings import Settings
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.runtime.composition import Federation
from tests.conftest import postgres_database
from tests.federation.protocol.vectors import A
from tests.peer import Peer
from workers.storage.sql import SqlStorage

OWN_URL = "https://a.example"

MakeSettings = Callable[..., Settings]


def make_all_tables(url: str) -> None:
    """Those of the application and those of the queues."""
    upgrade(url)
    with ThreadPoolExecutor(1) as apart:  # an asynchronous fixture may have asked: its loop runs in this thread
        apart.submit(asyncio.run, SqlStorage(url).migrate()).result()


def alter(url: str, *statements: str) -> None:
    """Somebody does this to the database, behind everybody's back."""
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database with all tables: copy it, never open it."""
    path = tmp_path_factory.mktemp("migrated") / "node.sqlite3"
    make_all_tables(f"sqlite:///{path}")
    return path


@pytest.fixture
def database_file(migrated_file: Path, tmp_path: Path) -> Path:
    """This test's own migrated database."""
    return Path(shutil.copy(migrated_file, tmp_path / "node.sqlite3"))


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable of ours is set; the working directory, which is returned, is empty."""
    for field in Settings.model_fields:
        monkeypatch.delenv(field.upper(), raising=False)
    directory = tmp_path / "working-directory"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: str) -> Iterator[str]:
    """The same on PostgreSQL: a template for databases, never to be connected to."""
    with postgres_database(postgres_server) as url:
        make_all_tables(url)
        yield url


@pytest.fixture
def migrated_postgres_url(postgres_server: str, migrated_postgres: str) -> Iterator[str]:
    """This test's own migrated database on PostgreSQL."""
    with postgres_database(postgres_server, template=migrated_postgres) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of a migrated, otherwise empty database; each test that asks for it runs on both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database_file')}"
    return str(request.getfixturevalue("migrated_postgres_url"))


@pytest.fixture(params=["sqlite", "postgres", "file", "redis", "bullmq", "bull"])
def queue_settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Settings that put the queues on a storage; each test that asks for it runs on every one.

    On SQLite and PostgreSQL the queues lie beside the rows, as they do by default.
    """
    if request.param == "sqlite":
        return {}
    if request.param == "postgres":
        return {"database_url": request.getfixturevalue("migrated_postgres_url")}
    if request.param == "file":
        return {"queue_url": f"file://{tmp_path / 'queues'}"}
    redis_url, prefix = request.getfixturevalue("redis_url"), request.getfixturevalue("queue_prefix")
    return {**redis_place(request.param, redis_url), "federation_queue_prefix": prefix}


def redis_place(layout: str, redis_url: str) -> dict[str, object]:
    """Settings that put the queues on this server, in that layout: `redis`, `bullmq` or `bull`."""
    places: dict[str, dict[str, object]] = {
        "redis": {"queue_url": redis_url},
        "bullmq": {"redis_url": redis_url},
        "bull": {"queue_url": f"bull+{redis_url}"},
    }
    return places[layout]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The database of `database_url`, opened."""
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture
async def queue_prefix(redis_url: str) -> AsyncIterator[str]:
    """A prefix for queues' keys on `redis_url` that is this test's own; its keys are removed afterwards."""
    prefix = f"t-{uuid.uuid4().hex}"
    yield prefix
    async with Redis.from_url(redis_url) as redis:
        cursor = -1
        while cursor:
            cursor, keys = await redis.scan(max(cursor, 0), f"*{prefix}:*", 10_000)
            if keys:
                await redis.unlink(*keys)


@pytest.fixture
def make_settings(database_file: Path) -> MakeSettings:
    """Settings from nothing but its arguments: loopback allowed, vector A's keys, short pauses."""

    def make(**overrides: object) -> Settings:
        values: dict[str, object] = {
            "better_auth_url": OWN_URL,
            **{name.lower(): value for name, value in A.env.items()},
            "database_url": f"sqlite:///{database_file}",
            "dev_allowed_hostnames": "127.0.0.1",
            "federation_delivery_backoff": "5ms",
            "federation_health_first_delay": "1h",
            "federation_lease": "2s",
            "federation_grace": "5s",
        }
        return Settings.from_values({**values, **overrides})

    return make


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.fixture(scope="session")
def ssl_context() -> ssl.SSLContext:
    """Trusts nobody, so that not every node loads a hundred authorities for its plain loopback requests."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture
async def federation(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Federation]:
    """A node, not yet running: nothing is connected until it is used."""
    guard = AddressGuard(settings.dev_allowed_hostnames)
    node = Federation(settings, client=FederationClient(guard, ConnectionPool(guard, ssl_context=ssl_context)))
    yield node
    await node.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    """A peer that knows nobody and is not known; see `acquaint`."""
    async with Peer() as running:
        yield running
