"""Tasks that join the caller's transaction: awaited, and from code without async, over whatever owns it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.federation.sync.conftest import django_databases
from tests.patience import PATIENCE_SECONDS
from workers import EnqueueStatus, JobState, StorageError, Tasks, TypedTask, Unsupported
from workers.errors import ForeignLoop
from workers.storage.memory import MemoryStorage
from workers.tasks import InMemory

PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
Begin = Callable[[], AbstractContextManager[object]]


class Failed(Exception):
    """Rolls a transaction back."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    found: str = request.getfixturevalue("emptied_postgres_url")
    return found.replace("+psycopg", "")


@pytest.fixture
def app(url: str) -> Iterator[Tasks]:
    app = Tasks(url)
    asyncio.run(app.queue.migrate())
    yield app
    app.sync.close()


@pytest.fixture
def welcome(app: Tasks) -> TypedTask[[int], int]:
    @app.task(unique=timedelta(hours=1))
    async def welcome(user_id: int) -> int:
        return 2 * user_id

    return welcome


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    made = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@pytest.fixture(params=["session", "connection", "dbapi", "django"])
def begin(request: pytest.FixtureRequest, engine: Engine) -> Begin:
    """What owns a transaction in code without async."""

    @contextmanager
    def session() -> Iterator[object]:
        with Session(engine) as opened, opened.begin():
            yield opened

    @contextmanager
    def django() -> Iterator[object]:
        with django_databases(default=engine):
            from django.db import connection, transaction

            with transaction.atomic():
                yield connection

    @contextmanager
    def dbapi() -> Iterator[object]:
        if engine.dialect.name == "sqlite":
            with closing(sqlite3.connect(str(engine.url.database))) as lite, lite:
                yield lite
            return
        with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as post:
            yield post

    return {
        "session": session,
        "connection": engine.begin,
        "dbapi": dbapi,
        "django": django,
    }[request.param]


def test_plain_code_enqueues_with_its_transaction(app: Tasks, welcome: TypedTask[[int], int], begin: Begin) -> None:
    """Or not at all, and once for the same arguments; `options` say the same."""
    with suppress(Failed), begin() as connection:
        welcome.sync.enqueue(1, connection=connection)
        raise Failed
    assert app.sync.counts()[JobState.QUEUED] == 0
    with begin() as connection:
        first = welcome.sync.enqueue(1, connection=connection)
        again = welcome.options(connection=connection).sync.enqueue(1)
        other = welcome.sync.enqueue(2, connection=connection)
    assert (again.status, again.id, other.status) == (EnqueueStatus.DUPLICATE, first.id, EnqueueStatus.QUEUED)
    assert app.sync.counts()[JobState.QUEUED] == 2


async def test_coroutines_enqueue_with_their_transaction(app: Tasks, welcome: TypedTask[[int], int], url: str) -> None:
    scheme = "sqlite+aiosqlite" if url.startswith("sqlite") else "postgresql+psycopg"
    engine = create_async_engine(f"{scheme}:{url.partition(':')[2]}")
    async with app:
        async with AsyncSession(engine) as session:
            await welcome.enqueue(1, connection=session)
            await session.rollback()
        assert not any((await app.queue.counts()).values())
        async with AsyncSession(engine) as session, session.begin():
            first = await welcome.enqueue(1, connection=session)
            again = await welcome.options(connection=session).enqueue(1)
        assert (again.status, again.id) == (EnqueueStatus.DUPLICATE, first.id)
        assert await first.result(PATIENCE) == 2
        assert await asyncio.to_thread(welcome.sync.enqueue(2).result, PATIENCE) == 4
    await engine.dispose()


def test_how_its_owner_reads_rows_is_nothing_to_a_connection(
    app: Tasks, welcome: TypedTask[[int], int], engine: Engine
) -> None:
    """As dicts, for example: the job is there all the same, and the owner reads as before."""
    lent: sqlite3.Connection | psycopg.Connection[dict[str, object]]
    if engine.dialect.name == "sqlite":
        lent = sqlite3.connect(str(engine.url.database))
        lent.row_factory = lambda cursor, row: dict(zip((each[0] for each in cursor.description), row, strict=True))
    else:
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        lent = psycopg.connect(url, row_factory=dict_row)
    assert welcome.sync.enqueue(1, connection=lent).status is EnqueueStatus.QUEUED
    assert welcome.sync.enqueue(1, connection=lent).status is EnqueueStatus.DUPLICATE
    assert lent.execute("SELECT 1 AS one").fetchone() == {"one": 1}
    lent.commit()
    lent.close()
    assert app.sync.counts()[JobState.QUEUED] == 1


def test_another_database_and_what_is_no_transaction_are_told(welcome: TypedTask[[int], int], tmp_path: Path) -> None:
    """Before anything is written there."""
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with other.begin() as connection, pytest.raises(StorageError, match="belongs to another database than the jobs"):
        welcome.sync.enqueue(1, connection=connection)
    other.dispose()
    lite = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    with pytest.raises(ValueError, match="in autocommit; begin a transaction"):
        welcome.sync.enqueue(1, connection=lite)
    lite.close()
    with pytest.raises(TypeError, match="connection must be an SQLAlchemy Connection"):
        welcome.sync.enqueue(1, connection="jobs.db")
    with pytest.raises(ValueError, match="user_id"):
        welcome.sync.enqueue("secret", connection=lite)


async def test_an_engine_in_autocommit_has_no_transaction(
    app: Tasks, welcome: TypedTask[[int], int], engine: Engine, url: str
) -> None:
    """A rollback would leave the job: it is refused, however the engine came by its isolation level."""
    scheme = "sqlite+aiosqlite" if url.startswith("sqlite") else "postgresql+psycopg"
    other = create_async_engine(f"{scheme}:{url.partition(':')[2]}", isolation_level="AUTOCOMMIT")
    async with other.connect() as connection, AsyncSession(other) as session:
        for caller in (connection, session):
            with pytest.raises(ValueError, match="in autocommit; begin a transaction"):
                await welcome.enqueue(1, connection=caller)
    await other.dispose()
    plain = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with plain, pytest.raises(ValueError, match="in autocommit; begin a transaction"):
        welcome.sync.enqueue(1, connection=plain)
    assert not any((await app.queue.counts()).values())
    await app.queue.stop()


async def test_a_queue_of_one_loop_is_for_one_kind_of_code() -> None:
    """Beside a loop that uses the one storage there is, plain code is refused; alone it works, on any storage."""
    app = Tasks(MemoryStorage())

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    await double.enqueue(1)
    with pytest.raises(ForeignLoop):
        await asyncio.to_thread(double.sync.enqueue, 2)
    with pytest.raises(Unsupported, match="cannot join a transaction"):
        await double.enqueue(2, connection=object())


def test_plain_code_runs_its_tests_in_memory(app: Tasks, welcome: TypedTask[[int], int]) -> None:
    with app.in_memory(eager=True):
        assert welcome.sync.enqueue(3).result(PATIENCE) == 6
    assert not any(app.sync.counts().values())


def test_what_plain_code_enqueued_is_drained_in_any_loop() -> None:
    """By plain tests, loop after loop, and by coroutines that call plain code; plain tasks may enqueue more."""
    app = Tasks("memory://")
    seen: list[int] = []

    @app.task
    def count(number: int) -> None:
        seen.append(number)
        if number:
            count.sync.enqueue(number - 1)

    async def drained(memory: InMemory) -> int:
        return (await memory.drain()).completed

    async def called(memory: InMemory) -> int:
        count.sync.enqueue(0)
        return (await memory.drain()).completed

    with app.in_memory() as memory:
        for _ in range(2):
            count.sync.enqueue(0)
            assert [job.name for job in asyncio.run(memory.jobs())] == ["count"]
            assert asyncio.run(drained(memory)) == 1
        assert asyncio.run(called(memory)) == 1
    with app.in_memory(eager=True):
        count.sync.enqueue(2)
    assert seen == [0, 0, 0, 2, 1, 0]


async def test_an_argument_may_be_called_connection() -> None:
    """It is the function's then, and the transaction goes by `options`."""
    app = Tasks("memory://")

    @app.task
    async def dial(connection: str) -> str:
        return connection

    async with app:
        assert await (await dial.enqueue(connection="bob")).result(PATIENCE) == "bob"
