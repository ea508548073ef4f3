"""The environment of a node for plain code, and everything that plain code may write through."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import django
import psycopg
import pytest
import sqlmodel
from django.conf import settings as django_settings
from sqlalchemy import Engine, create_engine, make_url, select
from sqlalchemy.orm import Session

import federation
import federation.sync
from db import DeliveryJob
from db.url import parse_url
from federation.sync import Caller
from tests.federation.conftest import OWN_URL
from tests.federation.protocol.vectors import A

Transaction: TypeAlias = Callable[[], AbstractContextManager[Caller]]
"""Commits at the end of the block, rolls back if that raises."""


@pytest.fixture(params=["sqlite", "postgres", "bullmq", "bullmq-postgres"])
def place(
    request: pytest.FixtureRequest, empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The environment of a node: its rows in one of the databases, its queues beside them or on BullMQ."""
    kind: str = request.param
    on_postgres = "postgres" in kind
    url = (
        request.getfixturevalue("migrated_postgres_url")
        if on_postgres
        else f"sqlite:///{request.getfixturevalue('database_file')}"
    )
    environment = {
        "BETTER_AUTH_URL": OWN_URL,
        **A.env,
        "DATABASE_URL": url.replace("+psycopg", ""),
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
    }
    if "bullmq" in kind:
        environment["REDIS_URL"] = request.getfixturevalue("redis_url")
        environment["FEDERATION_QUEUE_PREFIX"] = request.getfixturevalue("queue_prefix")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield environment
    federation.sync.close()


@pytest.fixture
async def node(place: dict[str, str]) -> AsyncIterator[dict[str, str]]:
    """The same, and what the test's event loop opens is closed."""
    yield place
    await federation.close_federation()


@pytest.fixture
def engine(place: dict[str, str]) -> Iterator[Engine]:
    """The application's own engine on the node's database."""
    made = create_engine(parse_url(place["DATABASE_URL"]))
    yield made
    made.dispose()


@dataclass(frozen=True, slots=True)
class Way:
    """One way of plain code to its database."""

    transaction: Transaction
    name: str


@pytest.fixture(params=["session", "sqlmodel", "connection", "own", "dbapi", "django"])
def way(request: pytest.FixtureRequest, engine: Engine) -> Way:
    """Each test that asks for it runs on every one."""
    ways: dict[str, Transaction] = {
        "session": lambda: Session.begin(Session(engine)),
        "sqlmodel": lambda: sqlmodel.Session(engine).begin(),
        "connection": engine.begin,
        "own": federation.sync.transaction,
        "dbapi": lambda: _dbapi(engine),
        "django": lambda: _django(engine),
    }
    if request.param in ("session", "sqlmodel"):
        kind = sqlmodel.Session if request.param == "sqlmodel" else Session

        @contextmanager
        def in_session() -> Iterator[Caller]:
            with kind(engine) as session, session.begin():
                yield session

        ways[request.param] = in_session
    return Way(ways[request.param], request.param)


@contextmanager
def _dbapi(engine: Engine) -> Iterator[Caller]:
    """As a driver is used without any library above it."""
    if engine.dialect.name == "sqlite":
        lite = sqlite3.connect(str(engine.url.database))
        try:
            with lite:
                yield lite
        finally:
            lite.close()
    else:
        with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as post:
            yield post


def configure_django() -> None:
    """Django is set up once in a process, with a database that each test names anew."""
    if not django_settings.configured:
        unused = {"ENGINE": "django.db.backends.sqlite3", "NAME": "nobody's.sqlite3"}
        django_settings.configure(DATABASES={"default": unused}, INSTALLED_APPS=[], USE_TZ=True)
        django.setup()


@contextmanager
def _django(engine: Engine) -> Iterator[Caller]:
    with django_databases(default=engine):
        from django.db import connection, transaction

        with transaction.atomic():
            yield connection


@contextmanager
def django_databases(**engines: Engine) -> Iterator[None]:
    """Django has these databases for the block, by their aliases; a `default` among them."""
    configure_django()
    from django.db import connections

    before = dict(connections.databases)
    named = {alias: django_database(engine) for alias, engine in engines.items()}
    connections.databases.update(connections.configure_settings(named))
    for alias in engines:
        with suppress(AttributeError):  # one that another test has used, on a database of its own
            del connections[alias]
    try:
        yield
    finally:
        connections.close_all()
        for alias in engines:
            with suppress(AttributeError):
                del connections[alias]
        connections.databases.clear()
        connections.databases.update(before)


def django_database(engine: Engine) -> dict[str, object]:
    """The engine's database in a setting of Django's."""
    url = make_url(engine.url)
    if url.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or url.query.get("host", ""),
        "PORT": url.port or "",
    }


def owed(engine: Engine) -> set[str]:
    """Ids of the committed deliveries."""
    with Session(engine) as session:
        return set(session.execute(select(DeliveryJob.id)).scalars())
