"""How many of our files a delivery and an inbound post pass, see "What a trip costs" in CONTRIBUTING.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

import db
import federation as application
import workers
from db import User, create_host_tables
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import Site
from tests.federation.node.conftest import serving
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol import vectors
from tests.peer import Peer, acquaint
from tests.trips import entered_files

OURS: Final = (application, workers, db)


async def test_a_delivery_passes_few_files(federation: Federation, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a delivery passes anew, from what is owed to the row that is gone, raises the figure here."""
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)  # as in a process that traces nothing
    await acquaint(federation, peer)
    async with Site(federation) as site:
        with entered_files(*OURS) as entered:
            fate = await site.outcome(await site.owe_post(peer))
    assert fate.row is None
    assert len(entered) <= 80, "\n".join(sorted(entered))


async def test_an_inbound_post_passes_few_files(database_file: Path) -> None:
    """The same of a post that arrives, from its request to its acknowledgment.

    After other tests they are fewer: statements are compiled once per process.
    """
    peer = RemoteServer(url="https://a.example", keys=vectors.A.keys)
    async with serving(f"sqlite:///{database_file}") as node:
        async with node.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
        await node.add(User(id="user-b"))
        await node.know(peer)
        with entered_files(*OURS) as entered:
            response = await node.post(peer)
    assert response.status_code == 200
    assert len(entered) <= 28, "\n".join(sorted(entered))
