"""Backups, other databases, other queues, other versions: real processes stop, the rest is moved, and all arrives."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from federation.runtime.composition import Federation
from tests import warm
from tests.acceptance.moves import (
    Turnstile,
    application,
    arrivals,
    command,
    delivered_by,
    put_back,
    rows_left,
    stopped_after,
)
from tests.acceptance.site import numbered, owe
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.conftest import redis_place
from tests.patience import until
from tests.peer import Peer, acquaint
from tests.servers import POSTGRES_PROGRAMS
from workers import JobState

OWED, DELIVERED = 40, 12
SHORT_LEASE = {"FEDERATION_LEASE": "1s"}
"""For what is killed alone: a process that gets no core for so long sends twice, as it should."""
OPEN = {JobState.QUEUED, JobState.SCHEDULED, JobState.PROCESSING, JobState.FAILING}


@pytest.fixture
def embedded(base_environment: dict[str, str], database_file: Path) -> dict[str, str]:
    """Rows and queues in one SQLite file; whatever recurs does so quickly."""
    return {
        **base_environment,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_GRACE": "500ms",
        "FEDERATION_DELIVERY_BACKOFF": "200ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
    }


@pytest.fixture
def on_bullmq(embedded: dict[str, str], redis_url: str, queue_prefix: str) -> dict[str, str]:
    """The same rows, with the queues on BullMQ."""
    place = redis_place("bullmq", redis_url)
    return {
        **embedded,
        **{name.upper(): str(value) for name, value in place.items()},
        "FEDERATION_QUEUE_PREFIX": queue_prefix,
    }


@pytest.fixture
def environment(embedded: dict[str, str]) -> dict[str, str]:
    return embedded


async def owing(settings: dict[str, str], worker: WorkerProcess, peer: Peer) -> list[str]:
    """The node knows the peer, and owes it posts, which the worker will find there."""
    worker.environment = settings
    sent = numbered("post", OWED)
    async with application(settings) as node:
        await acquaint(node, peer)
        await owe(node, peer, sent)
    return sent


async def saved_at_work(
    settings: dict[str, str], worker: WorkerProcess, peer: Peer, save: Callable[[], Awaitable[object]]
) -> list[str]:
    """The database was saved while the worker delivered, which went on, and was killed; what was owed."""
    sent = await owing(settings, worker, peer)
    turnstile = Turnstile(peer)
    await worker.start()
    await turnstile.let(DELIVERED)
    await save()
    await turnstile.let(DELIVERED)
    worker.kill()
    await turnstile.remove()
    return sent


@pytest.mark.spread("queue")
@pytest.mark.parametrize("queue", ["embedded", "bullmq", "bullmq that lost everything"])
@pytest.mark.timeout(600)
async def test_a_backup_of_the_database_has_all_that_is_owed(
    embedded: dict[str, str],
    on_bullmq: dict[str, str],
    queue: str,
    worker: WorkerProcess,
    peer: Peer,
    database_file: Path,
    tmp_path: Path,
) -> None:
    """Made while a worker delivers, and put back when more was delivered: that comes once more, and nothing is missing.

    The queue is the file's own; or one elsewhere, which remembers what the database has forgotten; or an empty one.
    """
    settings = {**(embedded if queue == "embedded" else on_bullmq), **SHORT_LEASE}
    backup = tmp_path / "backup.sqlite3"
    save = partial(command, settings, tmp_path, "db", "backup", str(backup))
    sent = await saved_at_work(settings, worker, peer, save)
    put_back(backup, database_file)
    if queue == "bullmq that lost everything":
        settings = {**settings, "FEDERATION_QUEUE_PREFIX": f"{settings['FEDERATION_QUEUE_PREFIX']}:empty"}
    await delivered_by(worker, settings)
    assert arrivals(peer).keys() == set(sent)
    assert peer.replayed >= DELIVERED
    assert peer.refused == []


@pytest.mark.timeout(600)
async def test_a_dump_of_postgresql_has_all_that_is_owed(
    embedded: dict[str, str],
    worker: WorkerProcess,
    peer: Peer,
    migrated_postgres_url: str,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    """The same by PostgreSQL's own tools, of which `federation db backup` names the one to run."""
    old, new = ({**embedded, **SHORT_LEASE, "DATABASE_URL": url} for url in (migrated_postgres_url, postgres_url))
    backup = tmp_path / "backup"
    sent = await saved_at_work(old, worker, peer, partial(dump_as_told, old, backup))
    target = postgres_url.replace("postgresql+psycopg", "postgresql")
    await run(POSTGRES_PROGRAMS / "pg_restore", "--exit-on-error", f"--dbname={target}", str(backup))
    await delivered_by(worker, new)
    assert arrivals(peer).keys() == set(sent)
    assert peer.replayed >= DELIVERED
    assert peer.refused == []


@pytest.mark.spread("queue")
@pytest.mark.parametrize("queue", ["embedded", "bullmq"])
@pytest.mark.timeout(600)
async def test_a_node_moves_from_sqlite_to_postgresql(
    embedded: dict[str, str],
    on_bullmq: dict[str, str],
    queue: str,
    worker: WorkerProcess,
    peer: Peer,
    database_file: Path,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    """In the middle of its work, between an orderly stop and a start: each delivery arrives, and none twice."""
    old = embedded if queue == "embedded" else on_bullmq
    new = {**old, "DATABASE_URL": postgres_url}
    sent = await owing(old, worker, peer)
    await stopped_after(worker, peer, DELIVERED)
    await command(new, tmp_path, "upgrade", "--host-tables")
    copied = await command(new, tmp_path, "db", "copy", "--from", str(database_file))
    assert copied["rows"]["delivery_jobs"] == OWED - DELIVERED
    await delivered_by(worker, new)
    assert arrivals(peer) == Counter(sent)


@pytest.mark.timeout(600)
async def test_a_node_on_postgresql_moves_to_bullmq(
    embedded: dict[str, str], on_bullmq: dict[str, str], worker: WorkerProcess, peer: Peer, migrated_postgres_url: str
) -> None:
    """Its queues were in that database, and in the middle of their work: each delivery arrives, and none twice."""
    old, new = ({**each, "DATABASE_URL": migrated_postgres_url} for each in (embedded, on_bullmq))
    sent = await owing(old, worker, peer)
    await stopped_after(worker, peer, DELIVERED)
    await delivered_by(worker, new)
    assert arrivals(peer) == Counter(sent)


@pytest.mark.timeout(600)
async def test_a_node_moves_to_bullmq_and_back(
    embedded: dict[str, str], on_bullmq: dict[str, str], worker: WorkerProcess, peer: Peer
) -> None:
    """Each time in the middle of its work. Jobs that stayed in the other queue send nothing when their time comes."""
    early, late = numbered("early", OWED), numbered("late", OWED)
    async with application(embedded) as node:
        await acquaint(node, peer)
        await owe(node, peer, early)
    await stopped_after(worker, peer, DELIVERED)
    await delivered_by(worker, on_bullmq)
    assert arrivals(peer) == Counter(early)
    async with application(on_bullmq) as node:
        await owe(node, peer, late)
    await stopped_after(worker, peer, DELIVERED)

    async with application(embedded) as node:
        await node.delivery_queue.start()
        left = await node.delivery_queue.storage.counts()
        assert sum(left[state] for state in OPEN) == OWED - DELIVERED, "jobs of what went out by the other queue"
        worker.environment = embedded
        await worker.start()
        await until(lambda: is_idle(node))
    assert worker.terminate() == 0
    assert arrivals(peer) == Counter([*early, *late])
    worker.environment = on_bullmq
    async with application(on_bullmq) as node:
        await worker.start()
        await until(lambda: is_idle(node))
    assert worker.terminate() == 0
    assert arrivals(peer) == Counter([*early, *late])


async def dump_as_told(environment: dict[str, str], file: Path) -> None:
    """What the command says is to be run has been."""
    process = await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-m", "federation", "db", "backup", str(file)),
        env=environment,
        cwd=file.parent,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    program, *arguments = shlex.split(told.decode().partition("tool: ")[2])
    assert (process.returncode, program) == (2, "pg_dump")
    await run(POSTGRES_PROGRAMS / program, *arguments)


async def run(program: Path, *arguments: str) -> None:
    """It went well."""
    process = await asyncio.create_subprocess_exec(program, *arguments)
    assert await process.wait() == 0


async def is_idle(node: Federation) -> bool:
    """Nothing is owed, and no job of a delivery is left that could run."""
    await node.delivery_queue.start()
    counts = await node.delivery_queue.storage.counts()
    return await rows_left(node) == 0 and not any(counts[state] for state in OPEN)
