"""Fixtures every test may use: real servers, one per run, and a database of its own per test."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import pytest
import sqlalchemy
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.servers import ValkeyProcess, postgres, valkey

# The conformance suite is a library: without this its bare asserts would say nothing. Before anybody imports it.
pytest.register_assert_rewrite("workers.testing")

# The same tree gives the same answer each time, however busy the machine. To look for something new:
# `pytest --hypothesis-profile=default`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With `-n`: each test goes to whichever worker is free, but all that need Spark to one, so that one JVM runs."""
    return SparkTogether(config, log)


class SparkTogether(LoadScopeScheduling):
    """What `--dist loadgroup` is for, which pytest 9.2 and xdist 3.8 do not do together."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith("tests/federation/analytics/") else nodeid


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyProcess]:
    """The run's shared Valkey: never restart or flush this one, make your own with `valkey()`."""
    with valkey() as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: ValkeyProcess) -> str:
    """URL of a real Valkey server; use a queue name or prefix of your own, the server is shared."""
    return valkey_server.url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres() as url:
        yield url


@contextlib.contextmanager
def postgres_database(server: str, *, template: str | None = None) -> Iterator[str]:
    """URL (psycopg 3) of a database that is dropped afterwards: empty, or a copy of the database `template` names."""
    name = f"test_{uuid.uuid4().hex}"
    source = f" TEMPLATE {sqlalchemy.make_url(template).database}" if template else ""
    admin = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}{source}"))
    yield sqlalchemy.make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """SQLAlchemy URL (psycopg 3) of an empty PostgreSQL database that is dropped after the test."""
    with postgres_database(postgres_server) as url:
        yield url
