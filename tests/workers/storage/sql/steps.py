"""The short steps that tests of the SQL storage are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, TextClause, event, text

from tests import warm
from workers.jobs import Claim
from workers.storage.base import Storage
from workers.storage.sql import SqlStorage
from workers.storage.sql.direct import Answer, Direct, Values
from workers.storage.sql.postgres.driver.direct import PostgresDirect, Sent
from workers.storage.sql.sqlite.changes.watcher import SqliteWatcher
from workers.storage.sql.sqlite.database import SqliteDatabase
from workers.testing import steps
from workers.testing.steps import PATIENCE, job, until

MINUTE = timedelta(minutes=1)
OFTEN = 8
"""After so many times a statement is prepared on the connection that is used again and again."""

on_sqlite = pytest.mark.parametrize("database", ["sqlite"])
on_postgres = pytest.mark.parametrize("database", ["postgres"])


@asynccontextmanager
async def connected(storage: SqlStorage) -> AsyncIterator[SqlStorage]:
    await storage.connect()
    try:
        yield storage
    finally:
        await storage.disconnect()


async def claim_all(storage: Storage) -> list[Claim]:
    """Every job that is claimable, in one claim."""
    return await steps.claim(storage, 1_000)


async def claimed_when_back(storage: Storage, count: int) -> list[Claim]:
    """So many jobs, as soon as what held them has been released."""
    claims: list[Claim] = []

    async def are_back() -> bool:
        claims.extend(await steps.claim(storage, count))
        return len(claims) == count

    await until(are_back)
    return claims


async def ids(storage: Storage) -> list[str]:
    """The ids of what `claim_all` brings."""
    return steps.ids(await claim_all(storage))


@contextmanager
def carried_out(tell: Callable[[str], None]) -> Iterator[None]:
    """Each statement that a step of ours has carried out meanwhile, on either database, is told of."""
    execute, send = Direct.execute, PostgresDirect.send

    def directly(self: Direct, statement: TextClause, values: Values | Sequence[Values] = ()) -> Answer:
        answer = execute(self, statement, values)
        tell(statement.text)
        return answer

    def by_the_event_loop(self: PostgresDirect, statement: TextClause, values: Values) -> Sent | None:
        sent = send(self, statement, values)
        if sent is not None:
            tell(statement.text)
        return sent

    def by_sqlalchemy(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        tell(statement)

    event.listen(Engine, "after_cursor_execute", by_sqlalchemy)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Direct, "execute", directly)
            patch.setattr(PostgresDirect, "send", by_the_event_loop)
            yield
    finally:
        event.remove(Engine, "after_cursor_execute", by_sqlalchemy)


def change(engine: Engine, *statements: str) -> None:
    """The statements are carried out, in one connection."""
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


@asynccontextmanager
async def child(verb: str, url: str, argument: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has connected and waits for `go`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        warm.PYTHON,
        *("-m", "tests.workers.storage.sql.child", verb, url, argument),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(3 * PATIENCE):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def database_of(storage: SqlStorage) -> SqliteDatabase:
    """The file of a connected storage, as this process uses it."""
    database = storage._database()
    assert isinstance(database, SqliteDatabase)
    return database


def watcher_of(storage: SqlStorage) -> SqliteWatcher:
    """The thread that looks for others' commits to that file."""
    return database_of(storage)._reader


async def rows_read(storage: SqlStorage, admin: psycopg.Connection) -> int:
    """How many rows PostgreSQL has fetched so far, in whole tables or by an index."""
    await storage.disconnect()  # which makes its connections report
    await storage.connect()
    found = admin.execute(
        "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname <> 'workers_queues')"
        " + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
    ).fetchone()
    assert found is not None
    return int(found[0])


async def exchange_ons(storage: SqlStorage, times: int = OFTEN) -> None:
    """Every kind of short step, so many times."""
    for number in range(times):
        await storage.enqueue([job(f"{number}-a"), job(f"{number}-b"), job(f"{number}-c")])
        [claim] = await steps.claim(storage, 1)
        await storage.renew([claim])
        turn = await storage.settle_and_claim([steps.completed(claim)], "w", leases={"*": MINUTE}, limit=1)
        await storage.settle([steps.completed(claim) for claim in turn.claims or ()])
        await storage.wait(["work"], timeout=timedelta(0))
        await storage.settle([steps.completed(claim) for claim in await steps.claim(storage, 1)])
        await storage.enqueue([job(f"{number}-d")])
        await storage.settle([steps.completed(claim) for claim in await steps.claim(storage, 1)])


def go(process: asyncio.subprocess.Process) -> None:
    """The child may go on."""
    assert process.stdin is not None
    process.stdin.write(b"go\n")
