"""Each test that asks for `database_url` or `database` runs twice: on an SQLite file and on PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from db import Database
from db.migrate import upgrade
from tests.conftest import postgres_database


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/node.db"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty database; of one with our tables where the test asks for `database`, too."""
    state = "migrated_" if "database" in request.fixturenames else ""
    return str(request.getfixturevalue(f"{state}{request.param}_url"))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A migrated, otherwise empty database."""
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "node.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: str) -> Iterator[str]:
    with postgres_database(postgres_server) as url:
        upgrade(url)
        yield url


@pytest.fixture
def migrated_sqlite_url(sqlite_url: str, _migrated_file: Path, tmp_path: Path) -> str:
    shutil.copy(_migrated_file, tmp_path / "node.db")
    return sqlite_url


@pytest.fixture
def migrated_postgres_url(postgres_server: str, _migrated_postgres: str) -> Iterator[str]:
    with postgres_database(postgres_server, template=_migrated_postgres) as url:
        yield url
