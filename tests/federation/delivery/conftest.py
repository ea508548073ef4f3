"""A site: a node that knows the peer and is known to it, with a worker that starts when a test waits for a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from db import Database
from federation.base.settings.settings import Settings
from federation.delivery.ledger.ledger import Ledger
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.peer import Peer, acquaint


@pytest.fixture
def settings(request: pytest.FixtureRequest, make_settings: MakeSettings) -> Settings:
    """With the queue on each storage for tests marked so: `usefixtures("queue_settings")`."""
    everywhere = "queue_settings" in request.fixturenames
    return make_settings(**(request.getfixturevalue("queue_settings") if everywhere else {}))


@pytest.fixture
async def site(federation: Federation, peer: Peer) -> AsyncIterator[Site]:
    await acquaint(federation, peer)
    async with Site(federation) as running:
        yield running


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    return Ledger(database)


@pytest.fixture
async def sqlite(database_file: Path) -> AsyncIterator[Database]:
    """For what only SQLite's triggers and renames show in a line."""
    database = Database(f"sqlite:///{database_file}")
    yield database
    await database.close()
