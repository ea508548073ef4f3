"""A queue on each storage, a PostgreSQL server to stop, and a database with the tables of queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from tests.conftest import postgres_database
from tests.servers import PostgresProcess, postgres_process
from tests.workers.harnesses import HARNESSES
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import Harness, all_cases

ORDINARY: Final = next(case for case in all_cases() if not case.needs)


@pytest.fixture(params=HARNESSES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Each storage in turn."""
    async with HARNESSES[request.param](ORDINARY, request) as opened:
        yield opened


@pytest.fixture(params=["memory", "sqlite"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    """A connected queue, in memory and in a file."""
    if request.param == "memory":
        yield MemoryStorage()
        return
    durable = SqlStorage(f"sqlite:///{tmp_path}/jobs.db")
    await durable.migrate()
    await durable.connect()
    yield durable
    await durable.disconnect()


@pytest.fixture(scope="session")
def own_postgres() -> Iterator[PostgresProcess]:
    with postgres_process() as server:
        yield server


@pytest.fixture
def restartable_postgres(own_postgres: PostgresProcess) -> PostgresProcess:
    """A running server that the test may stop; tests on it share a database."""
    own_postgres.start()
    return own_postgres


@pytest.fixture(scope="session")
def shared_postgres_url(postgres_server: str) -> Iterator[str]:
    """A database with the tables of queues, one for the run: to make one takes longer than most tests do."""
    with postgres_database(postgres_server) as url:
        with ThreadPoolExecutor(1) as apart:  # an asynchronous fixture may have asked: its loop runs in this thread
            apart.submit(asyncio.run, SqlStorage(url).migrate()).result()
        yield url


@pytest.fixture
def emptied_postgres_url(shared_postgres_url: str) -> str:
    """That database, with nothing in its tables."""
    with psycopg.connect(shared_postgres_url.replace("+psycopg", ""), autocommit=True) as admin:
        found = admin.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
            " AND table_name LIKE 'workers\\_%' AND table_name <> 'workers_schema'"
        ).fetchall()
        for (table,) in found:
            admin.execute(SQL("DELETE FROM {}").format(Identifier(table)))
    return shared_postgres_url
