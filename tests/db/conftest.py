"""Each test that asks for `database_url` or `database` runs twice: on an SQLite file and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from db import Database
from db.migrate import upgrade


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/node.db"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty database."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A migrated, otherwise empty database."""
    upgrade(database_url)
    database = Database(database_url)
    yield database
    await database.close()
