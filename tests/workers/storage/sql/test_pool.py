"""Short steps on PostgreSQL take no thread, and whatever happens to them meanwhile, the next ones have a connection."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DBAPIError

from tests.patience import PATIENCE_SECONDS
from tests.workers.storage.sql.steps import MINUTE, OFTEN, claimed_when_back, exchange_ons
from workers.errors import StorageUnavailable
from workers.jobs import SettleStatus
from workers.storage.sql import SqlStorage
from workers.storage.sql.database import outcome
from workers.storage.sql.direct import Executor
from workers.storage.sql.postgres.driver.loop_step import Asking
from workers.storage.sql.postgres.driver.pool import StepPool
from workers.storage.sql.postgres.driver.silence import Patience
from workers.storage.sql.postgres.target import PostgresTarget
from workers.storage.sql.rows import Transaction
from workers.testing import steps
from workers.testing.steps import PATIENCE, job, until


@pytest.fixture
def database() -> str:
    return "postgres"


@pytest.fixture
def pool(url: str) -> Iterator[StepPool]:
    engine = PostgresTarget(make_url(url), MINUTE).engine()
    pool = StepPool(engine, "the database", 2, "pool", Patience(MINUTE))
    yield pool
    pool.close(time.monotonic())
    engine.dispose()


async def test_a_step_takes_no_thread(storage: SqlStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    await exchange_ons(storage)
    await storage.drain()
    taken = threads_taken(monkeypatch)
    await storage.enqueue([job("a"), job("b")])
    [claim] = await steps.claim(storage, 1)
    await storage.renew([claim])
    turn = await storage.settle_and_claim([steps.completed(claim)], "w", leases={"*": MINUTE}, limit=1)
    assert steps.ids(turn.claims or ()) == ["b"]
    await storage.settle([steps.completed(claim) for claim in turn.claims or ()])
    assert taken == []


async def test_a_producer_opens_one_connection(storage: SqlStorage, admin: psycopg.Connection) -> None:
    await storage.enqueue([job("a")])
    [(others,)] = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ).fetchall()
    assert others == 1


@pytest.mark.parametrize("jobs", [[job("x", payload=b"x" * 100_000)], [job(str(number)) for number in range(200)]])
async def test_a_long_step_leaves_the_event_loop_alone(
    storage: SqlStorage, monkeypatch: pytest.MonkeyPatch, jobs: list[Any]
) -> None:
    await exchange_ons(storage)
    taken = threads_taken(monkeypatch)
    await storage.enqueue(jobs)
    assert len(taken) == 1


async def test_who_waits_for_a_lock_holds_up_nobody(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """The event loop goes on, and so do the steps of workers."""
    await exchange_ons(storage)
    await storage.enqueue([job("other")])
    with admin.transaction():
        hold_id(admin, "x")
        waiting = asyncio.create_task(storage.enqueue([job("x")]))
        await until(lambda: somebody_waits(admin))
        claims = await steps.claim(storage, 2)
        assert await storage.settle([steps.completed(claims[0])])
        assert not waiting.done()
        raise psycopg.Rollback
    assert [answer.id for answer in await asyncio.wait_for(waiting, PATIENCE)] == ["x"]


async def test_a_connection_cut_under_a_step_is_replaced(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """The step may have been carried out or not, as its caller is told; the next one is."""
    await exchange_ons(storage)
    with admin.transaction(force_rollback=True):
        hold_id(admin, "x")
        waiting = asyncio.create_task(storage.enqueue([job("x")]))
        await until(lambda: somebody_waits(admin))
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
        with pytest.raises(StorageUnavailable):
            await asyncio.wait_for(waiting, PATIENCE)
    assert [answer.id for answer in await storage.enqueue([job("x")])] == ["x"]


async def test_a_claim_that_is_cancelled_is_given_back(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Whatever it claims after nobody waits for it."""
    await exchange_ons(storage)
    await storage.drain()
    await storage.enqueue([job("x")])
    with admin.transaction(force_rollback=True):
        admin.execute("LOCK TABLE workers_seen IN ACCESS EXCLUSIVE MODE")
        claiming = asyncio.create_task(storage.claim("another", leases={"*": MINUTE}, limit=1))
        await until(lambda: somebody_waits(admin))
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    [claim] = await claimed_when_back(storage, 1)
    assert claim.attempt == 1


async def test_settlements_that_come_too_late_are_told_so(storage: SqlStorage) -> None:
    """Also if the event loop has to leave the second look to a thread."""
    await exchange_ons(storage)
    await storage.enqueue([job("x")])
    [claim] = await steps.claim(storage, 1)
    told = [await storage.settle([steps.completed(claim)]) for _ in range(2)]
    assert [answer.status for [answer] in told] == [SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED]


async def test_what_an_event_loop_leaves_behind_is_replaced(pool: StepPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application may run one event loop after the other, and end one in the middle of a step."""

    async def begin_and_leave() -> None:
        pool.step(of_no_queue, lambda _: sleep(60))

    for _ in range(OFTEN):
        await outcome(pool.step(of_no_queue, lambda _: sleep(0)))
    await asyncio.to_thread(asyncio.run, begin_and_leave())
    async with asyncio.timeout(PATIENCE):
        for _ in range(OFTEN):
            await outcome(pool.step(of_no_queue, lambda _: sleep(0)))
    taken = threads_taken(monkeypatch)
    await outcome(pool.step(of_no_queue, lambda _: sleep(0)))
    assert taken == []


async def test_a_blocked_event_loop_holds_no_thread_up(pool: StepPool) -> None:
    """As by a handler that waits for a step in another event loop, or in none."""

    def elsewhere() -> None:
        asyncio.run(outcome(pool.step(of_no_queue, lambda _: sleep(0))))

    both = threading.Barrier(2)
    for opened in [pool.submit(lambda _: both.wait(PATIENCE)) for _ in range(2)]:
        await asyncio.wrap_future(opened)
    under_way = [pool.step(of_no_queue, lambda _: sleep(0.1)) for _ in range(4)]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(elsewhere).result(PATIENCE)  # blocks this event loop
    for step in under_way:
        await outcome(step)


async def test_a_connection_cut_under_half_a_message_is_replaced(pool: StepPool, admin: psycopg.Connection) -> None:
    """The server has stopped reading, and then it is gone."""

    for _ in range(OFTEN):
        await outcome(pool.step(of_no_queue, lambda _: echo("x")))
    [(process,)] = admin.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ).fetchall()
    os.kill(process, signal.SIGSTOP)
    try:
        broken = pool.step(of_no_queue, lambda _: echo("x" * 50_000_000))
        await asyncio.sleep(0)
        admin.execute("SELECT pg_terminate_backend(%s)", [process])
    finally:
        os.kill(process, signal.SIGCONT)
    with pytest.raises(StorageUnavailable):
        await asyncio.wait_for(outcome(broken), PATIENCE)
    assert await outcome(pool.step(of_no_queue, lambda _: echo("y"))) == "y"


FORKING: Final = """
import asyncio, gc, os, sys
import psycopg
from workers.storage.sql import SqlStorage
from workers.testing.steps import job

SESSIONS = "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity WHERE datname = current_database()"

async def use():
    storage = SqlStorage(sys.argv[1])
    await storage.connect()
    await storage.enqueue([job("a")])
    return storage

storage = asyncio.run(use())
admin = psycopg.connect(sys.argv[1].replace("+psycopg", ""), autocommit=True)
before = admin.execute(SESSIONS).fetchone()
child = os.fork()
if not child:
    asyncio.run(storage.disconnect())
    gc.collect()
    sys.exit()
os.waitpid(child, 0)
asyncio.run(storage.enqueue([job("b")]))
assert admin.execute(SESSIONS).fetchone() == before
asyncio.run(storage.disconnect())
admin.close()
"""


def test_a_fork_leaves_the_parents_sessions_alone(url: str) -> None:
    """Though SQLAlchemy closes a connection that is in use by nobody any more."""
    subprocess.run([sys.executable, "-c", FORKING, url], check=True, timeout=PATIENCE_SECONDS)


async def test_a_message_longer_than_the_socket_takes_arrives_whole(pool: StepPool) -> None:
    for said in ["x"] * OFTEN + ["x" * 20_000_000]:
        assert await outcome(pool.step(of_no_queue, lambda _, said=said: echo(said))) == said


async def test_a_statement_that_somebody_dropped_is_carried_out_all_the_same(pool: StepPool) -> None:
    """As by a proxy that resets the sessions it shares."""

    def forget(connection: Connection) -> None:
        connection.connection.cursor().execute("DEALLOCATE ALL")

    for count in range(3 * OFTEN):
        if count == OFTEN:
            pool.submit(forget).result()
        assert await outcome(pool.step(of_no_queue, lambda _: echo("x"))) == "x"


async def test_a_step_can_see_that_its_statement_failed(pool: StepPool) -> None:
    """As in a thread, and do something about it."""

    def halve(by: int) -> Asking[int]:
        try:
            return int((yield text("SELECT 6 / CAST(:by AS integer) AS x"), {"by": by}).scalar_one())
        except DBAPIError:
            return int((yield lambda _: -1))

    for by, result in [(2, 3)] * OFTEN + [(0, -1), (3, 2)]:
        assert await outcome(pool.step(of_no_queue, lambda _, by=by: halve(by))) == result


def sleep(seconds: float) -> Asking[None]:
    yield text("SELECT pg_sleep(CAST(CAST(:seconds AS text) AS double precision))"), {"seconds": str(seconds)}


def echo(said: str) -> Asking[str]:
    return str((yield text("SELECT CAST(:said AS text)"), {"said": said}).scalar_one())


def of_no_queue(connection: Executor) -> Transaction:
    return Transaction(connection=connection, queue=0, clock=lambda _: 0)


def hold_id(admin: psycopg.Connection, name: str) -> None:
    """Whoever adds a job of that id waits for the end of this transaction."""
    admin.execute(
        "SELECT * FROM workers_enqueue((SELECT min(id) FROM workers_queues), ARRAY[%s], ARRAY['work'],"
        " ARRAY[0]::bigint[], ARRAY[0], ARRAY[1], ARRAY[NULL]::bigint[], ARRAY[NULL]::bigint[], ARRAY[NULL],"
        " ARRAY[NULL], ARRAY['']::bytea[], ARRAY[0], ARRAY[NULL], false)",
        [name],
    )


async def somebody_waits(admin: psycopg.Connection) -> bool:
    found = admin.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    return found is not None and bool(found[0])


def threads_taken(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is handed to threads from now on."""
    taken: list[object] = []
    submit = ThreadPoolExecutor.submit

    def noted(self: ThreadPoolExecutor, work: Any, /, *args: object, **options: object) -> Any:
        taken.append(work)
        return submit(self, work, *args, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
    return taken
