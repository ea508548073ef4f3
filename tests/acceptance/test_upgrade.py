"""A node of an earlier version is upgraded with deliveries in its queue, and can go back."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from alembic import command as alembic
from alembic.script import ScriptDirectory
from sqlalchemy import select, text

from db import DeliveryJob, DeliveryState
from db.backup import back_up
from db.engines import migration_engine
from db.migrate import _config, _location
from db.url import parse_url
from federation.base.jobs import POST_JOB
from federation.base.queues import DELIVERY_QUEUE_NAME, delivery_queue
from federation.base.settings import Settings
from federation.delivery.rows import delivery_job
from federation.node.posts import POSTS_PATH
from tests.acceptance.moves import application, arrivals, command, delivered_by, put_back
from tests.acceptance.site import OWN_URL, numbered, owe, post
from tests.acceptance.worker_process import WorkerProcess
from tests.peer import Peer, acquaint
from workers import JobState
from workers.storage.sql import SqlStorage

HOLDS_SINCE: Final = "0008"
"""The migration from which on deliveries can be held."""

EARLIER: Final = [
    each.revision
    for each in ScriptDirectory.from_config(_location()).walk_revisions()
    if each.nextrev and each.revision >= "0007"
]
"""Those before the present one, the version before this one first; further back the failures were not told apart."""

WITH_JOB, WITHOUT_JOB, OUT_OF_REACH = numbered("with-job", 5), numbered("without-job", 5), numbered("out-of-reach", 5)


@pytest.fixture
def database_file(tmp_path: Path) -> Path:
    """Not there yet."""
    return tmp_path / "node.sqlite3"


@pytest.fixture
def environment(base_environment: dict[str, str], database_file: Path) -> dict[str, str]:
    """Rows and queues in one SQLite file; whatever recurs does so quickly."""
    return {
        **base_environment,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_LEASE": "1s",
        "FEDERATION_DELIVERY_BACKOFF": "200ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
    }


@pytest.fixture(params=EARLIER)
async def earlier(request: pytest.FixtureRequest, environment: dict[str, str], peer: Peer) -> str:
    """The database is an earlier version's, which owes deliveries: some have a job, some have lost it, and for some
    the version had given up, or held them, as their server was out of reach. Its migration."""
    revision = str(request.param)
    engine = migration_engine(parse_url(environment["DATABASE_URL"]))
    with engine.begin() as connection:
        alembic.upgrade(_config(connection), revision)
        for post_id in (*WITH_JOB, *WITHOUT_JOB, *OUT_OF_REACH):
            values = row_of(post_id, peer, revision)
            names, places = ", ".join(values), ", ".join(f":{name}" for name in values)
            # Bound, so that SQLAlchemy writes the times: from Python 3.12 on sqlite3 warns when it has to.
            insert = text(f"INSERT INTO delivery_jobs ({names}) VALUES ({places})").bindparams(**values)
            connection.execute(insert)
    engine.dispose()
    storage = SqlStorage(environment["DATABASE_URL"], DELIVERY_QUEUE_NAME)
    await storage.migrate()
    # Not the queue of this version, whose jobs say more.
    queue = delivery_queue(Settings.from_values(environment), storage)
    target = peer.url + POSTS_PATH
    await queue.add_bulk(
        [
            delivery_job(POST_JOB, post_id, target_url=target, server_url=peer.url, payload_id=None)
            for post_id in WITH_JOB
        ]
    )
    await queue.stop()
    return revision


def row_of(post_id: str, peer: Peer, revision: str) -> dict[str, object]:
    """A delivery as the version of this migration has it."""
    now = datetime.now(UTC).replace(tzinfo=None)
    values: dict[str, object] = {
        "id": post_id,
        "target_url": peer.url + POSTS_PATH,
        "payload": post(OWN_URL, post_id),
        "created_at": now - timedelta(hours=1),
        "queued_at": now,
        "job_name": POST_JOB,
        "server_url": peer.url,
    }
    if revision >= HOLDS_SINCE:
        values |= {"job_id": post_id}
    if post_id not in OUT_OF_REACH:
        return values
    values |= {"attempts": 5, "error_code": "CONN_REFUSED", "last_error": "nothing listens on its port"}
    if revision >= HOLDS_SINCE:
        return {**values, "state": "held", "held_reason": "server", "held_at": now}
    return {**values, "settled_at": now - timedelta(minutes=5), "outcome": "retryable"}


@pytest.mark.spread("earlier", always=(EARLIER[0], HOLDS_SINCE, EARLIER[-1]))
@pytest.mark.timeout(600)
async def test_an_upgrade_loses_no_delivery(
    earlier: str, environment: dict[str, str], worker: WorkerProcess, peer: Peer, tmp_path: Path
) -> None:
    """What had a job, what had none, and what its server's absence had ended: each arrives once."""
    await command(environment, tmp_path, "upgrade")
    async with application(environment) as node:
        await acquaint(node, peer)
    await delivered_by(worker, environment)
    assert arrivals(peer) == Counter([*WITH_JOB, *WITHOUT_JOB, *OUT_OF_REACH])
    assert peer.refused == []


@pytest.mark.spread("earlier")
@pytest.mark.timeout(600)
async def test_the_backup_made_before_an_upgrade_is_the_way_back(
    earlier: str, environment: dict[str, str], worker: WorkerProcess, peer: Peer, database_file: Path, tmp_path: Path
) -> None:
    """It is the earlier version's database, row by row, whatever was done since; and it can be upgraded again."""
    backup = tmp_path / "before-upgrade"
    back_up(database_file, backup)
    before = dump(database_file)
    await command(environment, tmp_path, "upgrade")
    async with application(environment) as node:
        await acquaint(node, peer)
    await delivered_by(worker, environment)
    put_back(backup, database_file)
    assert dump(database_file) == before
    await command(environment, tmp_path, "upgrade")
    async with application(environment) as node:
        await acquaint(node, peer)
    await delivered_by(worker, environment)
    assert arrivals(peer) == Counter(2 * [*WITH_JOB, *WITHOUT_JOB, *OUT_OF_REACH])


async def test_released_deliveries_all_have_a_job_that_an_earlier_version_knows(
    environment: dict[str, str], peer: Peer, tmp_path: Path
) -> None:
    """As those do that it would have added itself: open, of a name it knows, with a reference to the row's text."""
    await command(environment, tmp_path, "upgrade")
    async with application(environment) as node:
        await acquaint(node, peer)
        await command(environment, tmp_path, "deliveries", "hold", peer.url)
        held = await owe(node, peer, numbered("held", 5))
        assert await node.delivery_queue.storage.status(held) == [None] * 5
        await command(environment, tmp_path, "deliveries", "release", "--all")
        async with node.database.read() as session:
            rows = (await session.execute(select(DeliveryJob))).scalars().all()
        assert {(row.id, row.state, row.settled_at) for row in rows} == {
            (each, DeliveryState.READY, None) for each in held
        }
        assert {row.job_id for row in rows} == {f"{each}.1" for each in held}
        jobs = await node.delivery_queue.storage.status([f"{each}.1" for each in held])
        assert [job.state for job in jobs if job is not None] == [JobState.QUEUED] * 5


def dump(file: Path) -> list[str]:
    """All that is in an SQLite database."""
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())
