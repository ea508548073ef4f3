"""A node whose host application has tables."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from db import create_host_tables, new_id
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings


@pytest.fixture
async def node(request: pytest.FixtureRequest, make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """A node with the host application's tables: on SQLite, or by parameter on PostgreSQL with BullMQ."""
    servers: dict[str, object] = {}
    if getattr(request, "param", "sqlite") == "postgres":
        servers = {
            "database_url": request.getfixturevalue("migrated_postgres_url"),
            "redis_url": request.getfixturevalue("redis_url"),
            "federation_queue_prefix": f"t-{new_id()}",
        }
    federation = Federation(make_settings(**servers))
    async with federation.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
    yield federation
    await federation.close()
