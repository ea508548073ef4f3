"""A queue with Node on the one side and a storage of ours on the other: BullMQ, or each version of Bull."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import warm
from tests.interop.bull_child import Order
from tests.interop.bull_queue import DIALECTS, Ids
from tests.interop.peer import BULLMQ, BullPeer, NodePeer, bull_peer, install_npm_packages, node_peer
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage


@pytest.fixture(scope="session")
def npm_packages() -> None:
    install_npm_packages()


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"interop-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture(params=BULLMQ.values())
def package(npm_packages: None, request: pytest.FixtureRequest) -> str:
    """The version of BullMQ in Node."""
    return str(request.param)


@pytest.fixture
async def node(package: str, redis_url: str, storage: BullMQStorage) -> AsyncIterator[NodePeer]:
    async with node_peer(package, redis_url, storage.queue) as peer:
        yield peer


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
    subprocess.run([warm.PYTHON, "-c", "pass"], check=True)  # its first start would hold our loop beyond a lease
    ledger = str(tmp_path / "child.ledger")
    return Order(url=redis_url, queue=queue.queue, dialect=DIALECTS[version], ledger=ledger)


@pytest.fixture
def ids(version: str) -> Ids:
    return Ids(version)
