"""One Bull queue with Node on the one side and `BullStorage` on the other, with each version of Bull."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.interop.bull_child import Order
from tests.interop.peer import BullPeer, bull_peer, install_npm_packages
from workers.storage.bull import BullStorage
from workers.storage.bull_codec import Dialect

DIALECTS: Final[dict[str, Dialect]] = {"1.0.0": "B", "1.1.3": "C"}
"""Of Bull's versions, as far as npm has them."""


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


class Ids:
    """Ids for jobs of ours: Bull 1.0 reads numbers only, 1.1 keeps those for its counter.

    They are far apart: the counter goes on from the last that was used.
    """

    def __init__(self, version: str) -> None:
        self._prefix = "" if version == "1.0.0" else "ours-"
        self._numbers = count(1_000, 1_000)

    def __call__(self) -> str:
        """One more."""
        return f"{self._prefix}{next(self._numbers)}"
