"""A queue and the application's table in one database, on both kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tests.workers.storage.sql.steps import connected
from workers.storage.sql import SqlStorage


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with the tables of the queue, and one of the application."""
    sqlite = request.param == "sqlite"
    url: str = f"sqlite:///{tmp_path}/jobs.db" if sqlite else request.getfixturevalue("postgres_url")
    await SqlStorage(url).migrate()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (queue TEXT, what TEXT)"))
    engine.dispose()
    return url


@pytest.fixture
async def storage(url: str) -> AsyncIterator[SqlStorage]:
    async with connected(SqlStorage(url)) as storage:
        yield storage
