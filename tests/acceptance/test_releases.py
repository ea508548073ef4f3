"""The databases of earlier releases, from 1.0 on: each is upgraded, and delivers what it owes. And their settings."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance.moves import application, arrivals, command, delivered_by
from tests.acceptance.releases.owed import HELD, PLACE, QUEUED, UNQUEUED
from tests.acceptance.worker_process import WorkerProcess
from tests.peer import Peer, acquaint

ROOT = Path(__file__).parents[2]
RELEASES = sorted((Path(__file__).parent / "releases").glob("*.sql"))


@pytest.fixture
def environment(base_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Rows and queues in one SQLite file; nothing is too old, and whatever recurs does so quickly."""
    return {
        **base_environment,
        "DATABASE_URL": f"sqlite:///{tmp_path}/released.sqlite3",
        "FEDERATION_DELIVERY_MAX_AGE": "0",
        "FEDERATION_LEASE": "1s",
        "FEDERATION_DELIVERY_BACKOFF": "200ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
    }


@pytest.fixture(params=RELEASES, ids=lambda file: file.stem)
def released(request: pytest.FixtureRequest, environment: dict[str, str], peer: Peer, tmp_path: Path) -> None:
    """The database is a release's, which owes to the peer."""
    script = request.param.read_text().replace(PLACE, peer.url)
    script = script.replace(PLACE.encode().hex().upper(), peer.url.encode().hex().upper())  # in payloads of jobs
    with closing(sqlite3.connect(tmp_path / "released.sqlite3")) as connection:
        connection.executescript(script)


@pytest.mark.usefixtures("released")
@pytest.mark.timeout(600)
async def test_an_upgrade_loses_no_delivery(
    environment: dict[str, str], worker: WorkerProcess, peer: Peer, tmp_path: Path
) -> None:
    """What had a job, what had lost it, and what was held: each arrives once."""
    await command(environment, tmp_path, "upgrade")
    async with application(environment) as node:
        await acquaint(node, peer)
    await command(environment, tmp_path, "deliveries", "release", "--all")
    await delivered_by(worker, environment)
    assert arrivals(peer) == Counter([*QUEUED, *UNQUEUED, *HELD])
    assert peer.refused == []


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "releases").glob("*.env")), ids=lambda file: file.stem)
async def test_the_settings_of_a_release_are_taken(file: Path, tmp_path: Path) -> None:
    """As its `federation init` wrote them, with nothing in the environment."""
    shutil.copy(file, tmp_path / ".env")
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    await command(bare, tmp_path, "upgrade")
    checked = await command(bare, tmp_path, "db", "check")
    assert checked["up_to_date"]
    assert (tmp_path / "federation.sqlite3").exists()
