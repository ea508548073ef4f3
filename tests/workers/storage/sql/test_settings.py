"""Sessions on PostgreSQL whose settings are not the default ones, by the role, the database or the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy import Connection, Engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tests.conftest import postgres_database
from tests.workers.harnesses import PostgresHarness
from tests.workers.running import AT_ONCE, outcome, running
from tests.workers.storage.sql.steps import claim_all, connected, on_postgres
from workers import WorkerOptions
from workers.errors import StorageError
from workers.jobs import Completed, JobOutcome, JobState, OutcomeKind, SettleStatus
from workers.kv.sql import SqlKvStore
from workers.storage.sql import SqlStorage
from workers.testing import Case, all_cases, run
from workers.testing.case import CUTS, FREEZES, RESTARTS, SWALLOWS
from workers.testing.steps import job
from workers.worker import Worker
from workers.worker.handlers import Job

ODD: Final = {
    "array_nulls": "off",
    "backslash_quote": "on",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "DateStyle": "SQL, DMY",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "IntervalStyle": "sql_standard",
    "plan_cache_mode": "force_custom_plan",
    "quote_all_identifiers": "on",
    "standard_conforming_strings": "off",
    "TimeZone": "Asia/Kathmandu",
    "transform_null_equals": "on",
}
"""Settings that change what a text, a value or a statement means."""

CORE: Final = frozenset({"enqueue", "claim", "renew", "settle", "progress", "payloads", "ordering"})
CASES: Final = [
    pytest.param(case, id=case.id, marks=() if case.id.partition(".")[0] in CORE else pytest.mark.full)
    for case in all_cases()
    if not {RESTARTS, CUTS, FREEZES, SWALLOWS} & {*case.needs}
]

PAYLOADS: Final = [b'{"n":0}', b"\\x00", b"\x00\xff'\\'", b"NULL", b""]


@pytest.fixture(scope="module")
def odd_url(postgres_server: str) -> Iterator[str]:
    """A database that only a role with every odd setting uses."""
    role = "odd"
    with postgres_database(postgres_server) as url:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
            admin.execute(SQL("CREATE ROLE {} LOGIN SUPERUSER").format(Identifier(role)))
            admin.execute(SQL("CREATE SCHEMA {}").format(Identifier(role)))
            for name, value in ODD.items():
                admin.execute(SQL("ALTER ROLE {} SET {} = {}").format(Identifier(role), Identifier(name), value))
        yield make_url(url).set(username=role).render_as_string(hide_password=False)
    with psycopg.connect(postgres_server.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute(SQL("DROP ROLE {}").format(Identifier(role)))


@pytest.fixture(scope="module")
def migrated_odd_url(odd_url: str) -> str:
    asyncio.run(SqlStorage(odd_url).migrate())
    return odd_url


@pytest.mark.parametrize("case", CASES)
async def test_the_core_of_the_suite_is_kept_by_a_role_with_every_odd_setting(
    case: Case, migrated_odd_url: str
) -> None:
    """Nothing of the storage depends on the settings of the role."""
    async with PostgresHarness(migrated_odd_url) as harness:
        await run(case, harness)


async def test_a_key_value_store_keeps_bytes_for_such_a_role(migrated_odd_url: str) -> None:
    """What was set is what is read, and compared."""
    store = SqlKvStore(migrated_odd_url)
    await store.migrate()
    async with store:
        for at, value in enumerate(PAYLOADS[:3]):
            await store.set(("a", str(at)), value, ttl=timedelta(minutes=1))
            assert await store.get(("a", str(at))) == value
            assert await store.compare_and_set(("a", str(at)), value, b"\\x01", ttl=timedelta(minutes=1))
            assert await store.get(("a", str(at))) == b"\\x01"


async def test_a_handlers_transaction_of_such_a_role_completes_its_job(migrated_odd_url: str) -> None:
    """`job.transaction()` ends the job with the result that the handler gave."""
    ended = JobOutcome(kind=OutcomeKind.COMPLETED, result=b'"\\\\x00"')

    async def handler(one: Job) -> None:
        async with one.transaction():
            one.complete("\\x00")

    async with connected(SqlStorage(migrated_odd_url, "transactions")) as storage:
        await storage.enqueue([job("a"), job("b"), job("c")])
        # One after the other: transactions that can be serialized fail if they run side by side.
        async with running(Worker(storage, {"*": handler}, concurrency=1, options=WorkerOptions(retry=AT_ONCE))):
            assert [await outcome(storage, name) for name in "abc"] == [ended] * 3


def make_odd(engine: Engine) -> None:
    """Every session of the engine has the settings."""

    @event.listens_for(engine, "connect")
    def set_all(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for name, value in ODD.items():
            cursor.execute("SELECT set_config(%s, %s, false)", (name, value))
        cursor.close()
        connection.commit()


@pytest.fixture
def odd_engine(engine: AsyncEngine) -> AsyncEngine:
    """An application whose sessions have the settings, in a database that has none of them."""
    make_odd(engine.sync_engine)
    return engine


@on_postgres
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
async def test_a_callers_settings_change_nothing(
    storage: SqlStorage, odd_engine: AsyncEngine, sync_engine: Engine, kind: str, count: int
) -> None:
    """Jobs and results that go over the caller's session are those that were given, however many go at once."""
    make_odd(sync_engine)
    new = [job(f"{at} \\ü", payload=payload) for at, payload in enumerate(PAYLOADS[:count])]
    async with joining(odd_engine, sync_engine, kind) as connection:
        await storage.enqueue(new, connection=connection)
    claims = await claim_all(storage)
    assert {one.job_id: one.payload for one in claims} == {one.id: one.payload for one in new}
    ends = [Completed(claim=one, result=one.payload) for one in claims]
    async with joining(odd_engine, sync_engine, kind) as connection:
        outcomes = await storage.settle(ends, connection=connection)
    assert {one.status for one in outcomes} == {SettleStatus.APPLIED}
    for one in new:
        assert await storage.result(one.id) == JobOutcome(kind=OutcomeKind.COMPLETED, result=one.payload)


@asynccontextmanager
async def joining(engine: AsyncEngine, sync_engine: Engine, kind: str) -> AsyncIterator[AsyncConnection | Connection]:
    """A transaction of the application's, which is committed."""
    if kind == "synchronous":
        with sync_engine.begin() as connection:
            yield connection
    else:
        async with engine.begin() as asynchronous:
            yield asynchronous


@on_postgres
async def test_a_caller_who_finds_other_tables_is_refused(storage: SqlStorage, engine: AsyncEngine, url: str) -> None:
    """A session whose `search_path` leads to the tables of another queue, or to none, brings no jobs there."""
    async with engine.begin() as connection:
        await connection.execute(text("CREATE SCHEMA tenant"))
    tenant = make_url(url).update_query_dict({"options": "-c search_path=tenant"}).render_as_string(hide_password=False)
    for is_migrated in (False, True):
        if is_migrated:
            await SqlStorage(tenant).migrate()
        async with engine.begin() as connection:
            await connection.execute(text("SET LOCAL search_path = tenant"))
            with pytest.raises(StorageError, match="search_path"):
                await storage.enqueue([job("a")], connection=connection)
    async with connected(SqlStorage(tenant)) as theirs:
        await theirs.enqueue([job("b")])
        assert await storage.status(["a", "b"]) == await theirs.status(["a"]) * 2 == [None, None]


@on_postgres
async def test_a_caller_whose_texts_are_bytes_is_refused(storage: SqlStorage, engine: AsyncEngine) -> None:
    """With `client_encoding = SQL_ASCII` psycopg returns bytes for texts."""
    async with engine.begin() as connection:
        await connection.execute(text("SET LOCAL client_encoding = SQL_ASCII"))
        with pytest.raises(StorageError, match="SQL_ASCII"):
            await storage.enqueue([job("a")], connection=connection)
    assert (await storage.counts())[JobState.QUEUED] == 0


@on_postgres
async def test_all_sessions_find_the_tables_of_the_first(
    storage: SqlStorage, admin: psycopg.Connection, url: str
) -> None:
    """A `search_path` that is changed while a process runs does not split its queue."""
    name = Identifier(make_url(url).database or "")
    admin.execute("CREATE SCHEMA elsewhere")
    admin.execute(SQL("ALTER DATABASE {} SET search_path = elsewhere").format(name))
    await SqlStorage(url).migrate()
    await storage.enqueue([job("before")])
    admin.execute(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await storage.enqueue([job("after")])
    assert admin.execute("SELECT id FROM public.workers_jobs ORDER BY id").fetchall() == [("after",), ("before",)]
