"""One Bull queue with Node on the one side and `BullStorage` on the other, with each version of Bull."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.interop.bull_child import Order
from tests.interop.bull_queue import DIALECTS, Ids
from tests.interop.peer import BullPeer, bull_peer, install_npm_packages
from workers.storage.bull import BullStorage


@pytest.fixture(scope="session")
def npm_packages() -> None:
    install_npm_packages()


@pytest.fixture(params=DIALECTS)
def version(request: pytest.FixtureRequest) -> str:
    """Of npm `bull`."""
    return str(request.param)


@pytest.fixture
async def queue(redis_url: str, version: str) -> AsyncIterator[BullStorage]:
    storage = BullStorage(redis_url, f"interop-{uuid.uuid4().hex}", dialect=DIALECTS[version])
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def peer(npm_packages: None, redis_url: str, queue: BullStorage, version: str) -> AsyncIterator[BullPeer]:
    async with bull_peer(version, redis_url, queue.queue) as peer:
        yield peer


@pytest.fixture
def order(redis_url: str, queue: BullStorage, version: str, tmp_path: Path) -> Order:
    """For a worker of ours that may be killed."""
    ledger = str(tmp_path / "child.ledger")
    return Order(url=redis_url, queue=queue.queue, dialect=DIALECTS[version], ledger=ledger)


@pytest.fixture
def ids(version: str) -> Ids:
    return Ids(version)
