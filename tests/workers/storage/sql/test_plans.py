"""How the databases find what a statement asks for: by an index that fits, in its order, and nothing else."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import TextClause

from tests.workers.storage.sql.steps import MINUTE, on_postgres, on_sqlite, rows_read
from workers.jobs import DROP, Completed, Retention, SettleStatus
from workers.storage.sql import SqlStorage
from workers.storage.sql.sqlite import claim as sql_claim
from workers.storage.sql.sqlite import enqueue as sql_enqueue
from workers.storage.sql.sqlite import settle as sql_settle
from workers.storage.sql.sqlite.changes import events as sql_events
from workers.storage.sql.steps import ends
from workers.storage.sql.steps import enqueue as sql_keys
from workers.storage.sql.steps import manage as sql_manage
from workers.storage.sql.steps import records as sql_records
from workers.testing.steps import claim, job

# SQLite: what its planner says of every statement


_FREE_TO_SCAN = {"workers_listeners"}  # one row per listening process


def _statements() -> Iterator[tuple[str, str]]:
    shared = (ends, sql_keys, sql_manage, sql_records)
    modules = (*shared, sql_claim, sql_enqueue, sql_events, sql_settle)
    for module in modules:
        for name, value in vars(module).items():
            found = [value]
            if isinstance(value, dict) and name == "_LIST":
                found = [statement for statements in value.values() for statement in statements]
            elif isinstance(value, list):
                found = value
            for choice in found:
                statement = choice["sqlite"] if isinstance(choice, dict) and "sqlite" in choice else choice
                if name.endswith("_POSTGRES") or not isinstance(statement, TextClause):
                    continue
                if "SELECT workers_" not in statement.text:
                    yield f"{module.__name__}.{name}", statement.text
    yield "of_names", sql_claim.of_names(3).text


def _plan(database: sqlite3.Connection, statement: str) -> list[str]:
    statement = re.sub(r"IN :(\w+)", lambda found: f"IN ({', '.join([':' + found[1]] * 50)})", statement)
    values = dict.fromkeys(re.findall(r":(\w+)", statement), 1)
    return [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


@on_sqlite
@pytest.mark.parametrize("descending", [False, True])
async def test_no_statement_scans_a_table(url: str, descending: bool) -> None:
    """Every statement finds its rows by an index that fits; none walks through all jobs of a queue.

    Where two indexes look alike the planner goes by the order they were made in: it must not matter.
    """
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    made = "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL ORDER BY name"
    for name, statement in database.execute(f"{made} {'DESC' if descending else 'ASC'}").fetchall():
        database.execute(f"DROP INDEX {name}")
        database.execute(statement)
    seen = 0
    for name, statement in _statements():
        seen += 1
        for line in _plan(database, statement):
            scanned = re.match(r"SCAN (workers_\w+)", line)
            assert scanned is None or scanned[1] in _FREE_TO_SCAN, (name, line)
            assert "workers_jobs_by_id (queue=?)" not in line, (name, line)
    database.close()
    assert seen > 40


@on_sqlite
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_claims_read_in_index_order(url: str, count: int) -> None:
    """The next jobs are the first of an index, for any name or for several, and are never sorted."""
    statement = sql_claim.of_names(count).text if count else sql_claim._OF_ANY_NAME.text
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    plan = _plan(database, statement)
    database.close()
    assert any("workers_jobs_ready" in line for line in plan)
    assert not any("TEMP B-TREE" in line for line in plan)


# PostgreSQL: what its planner says of the claims, and how much steps read


_IN_ORDER = {
    "workers_jobs_ready": "TRUE",
    "workers_jobs_ready_by_name": "name = 'work'",
}


@on_postgres
@pytest.mark.parametrize("index", _IN_ORDER)
async def test_claims_read_a_partial_index_in_order(storage: SqlStorage, admin: psycopg.Connection, index: str) -> None:
    """The next jobs are the first of an index that holds ready jobs only, and are never sorted."""
    await storage.enqueue([job(str(number)) for number in range(50)])
    admin.execute("SET enable_seqscan = off; SET enable_sort = off; SET enable_bitmapscan = off")
    plan = "\n".join(
        line
        for (line,) in admin.execute(
            "EXPLAIN SELECT seq, ordering_key FROM workers_jobs"
            f" WHERE queue = 1 AND state = 'ready' AND {_IN_ORDER[index]}"
            " ORDER BY priority, run_at, seq LIMIT 10 FOR UPDATE SKIP LOCKED"
        )
    )
    assert f"Index Scan using {index} " in plan
    assert "Sort" not in plan


@on_postgres
@pytest.mark.parametrize("keep", [DROP, MINUTE])
async def test_no_step_reads_more_of_a_long_queue(
    storage: SqlStorage, admin: psycopg.Connection, keep: Retention
) -> None:
    """With 8 000 jobs behind, and statistics of a time without any, every step fetches its own rows and no others."""
    admin.execute("ANALYZE")
    await enqueue_many(storage)
    before = await rows_read(storage, admin)
    await work(storage, keep)
    assert await rows_read(storage, admin) - before < 3_000


@on_postgres
@pytest.mark.parametrize("keep", [DROP, MINUTE])
async def test_no_plan_of_an_empty_queue_is_kept(
    storage: SqlStorage, admin: psycopg.Connection, keep: Retention
) -> None:
    """Sessions that have made their plans in an empty queue read no more of a long one: each of ten rounds would."""
    admin.execute("ANALYZE")
    before = await rows_read(storage, admin)
    await storage.enqueue([job(f"before {number}") for number in range(100)])
    await work(storage, keep)
    await enqueue_many(storage)
    await work(storage, keep)
    assert await rows_read(storage, admin) - before < 40_000


async def enqueue_many(storage: SqlStorage) -> None:
    for start in range(0, 8_000, 4_000):
        await storage.enqueue([job(str(start + number)) for number in range(4_000)])


async def work(storage: SqlStorage, keep: Retention) -> None:
    """All steps of a worker ten times."""
    for _ in range(10):
        claims = await claim(storage, 10)
        assert len(claims) == 10
        assert not (await storage.renew(claims)).lost
        outcomes = await storage.settle([Completed(claim=claimed, result=b"", keep=keep) for claimed in claims[::-1]])
        assert {outcome.status for outcome in outcomes} == {SettleStatus.APPLIED}
