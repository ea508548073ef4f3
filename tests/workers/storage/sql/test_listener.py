"""The one connection by which a process hears what others commit in a PostgreSQL database."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import psycopg
import pytest

from tests.workers.storage.sql.steps import MINUTE, claim_all, connected, ids
from workers.deduplication import Deduplication
from workers.errors import StorageUnavailable
from workers.jobs import DROP, Completed, JobEventKind
from workers.storage.sql import SqlStorage
from workers.storage.sql.postgres.driver.listener import PostgresListener, new_process
from workers.storage.sql.postgres.driver.silence import OwnConnection
from workers.storage.subscribers import DatabaseSubscribers
from workers.testing.steps import PATIENCE, job, until

LISTENER = "workers listener"


@pytest.fixture
def database() -> str:
    return "postgres"


async def is_listening(admin: psycopg.Connection) -> bool:
    found = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s", [LISTENER]
    ).fetchone()
    return found == (1,)


async def is_waiting(admin: psycopg.Connection, kind: str) -> bool:
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = %s AND NOT granted"
    return admin.execute(waiting, [kind]).fetchone() == (1,)


async def drop_listener(admin: psycopg.Connection) -> None:
    await until(lambda: is_listening(admin))
    ended = admin.execute(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s",
        [LISTENER],
    )
    assert ended.fetchall() == [(True,)]


async def test_a_dropped_listener_loses_no_wake_up(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """A job that arrives while nobody listens ends the wait as soon as somebody listens again."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    await drop_listener(admin)
    # Not through the storage, and announced by nobody: only the look after the reconnection finds it.
    with admin.transaction():
        admin.execute("INSERT INTO workers_jobs (queue, id, name, state, priority, run_at, created_at, max_attempts)"
                      " SELECT id, 'a', 'work', 'ready', 0, 0, 0, 1 FROM workers_queues")  # fmt: skip
        admin.execute("INSERT INTO workers_payloads SELECT seq, '' FROM workers_jobs")
    await asyncio.wait_for(waiting, PATIENCE)
    assert await ids(storage) == ["a"]


async def test_a_dropped_listener_loses_no_end_of_a_job(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Who waits for a job that ended while nobody listened is told of the end."""
    await storage.enqueue([job("a")])
    [claimed] = await claim_all(storage)
    database = storage._database()
    async with storage.subscribe("a") as events:
        listener = database._listener  # type: ignore[attr-defined]  # the PostgreSQL one
        connect = listener._connect
        refused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def refuse() -> psycopg.Connection:
            loop.call_soon_threadsafe(refused.set)
            raise psycopg.OperationalError("no")

        listener._connect = refuse
        await drop_listener(admin)
        await asyncio.wait_for(refused.wait(), PATIENCE)
        await storage.settle([Completed(claim=claimed, result=b"1")])
        listener._connect = connect
        while (await asyncio.wait_for(events.get(), PATIENCE)).kind is not JobEventKind.COMPLETED:
            pass


async def test_a_subscription_survives_the_listener(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """After a reconnection new events arrive as before."""
    async with storage.events() as events:
        await drop_listener(admin)
        await asyncio.sleep(0)
        await until(lambda: is_listening(admin))
        async with storage.subscribe("a"):  # confirmed, so the listener is back
            await storage.enqueue([job("a")])
            heard = await asyncio.wait_for(events.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.QUEUED, "a")


async def test_cancel_requests_are_heard_after_the_listener_was_dropped(
    storage: SqlStorage, admin: psycopg.Connection
) -> None:
    """Who listened is told of the gap and listens anew; requests arrive then, and nobody is registered for others."""
    await storage.enqueue([job("a")])
    await claim_all(storage)
    async with storage.cancel_requests() as requests:
        await drop_listener(admin)
        with pytest.raises(StorageUnavailable, match="the connection that listens"):
            await asyncio.wait_for(requests.get(), PATIENCE)
        async with storage.cancel_requests() as anew:  # confirmed, so the listener is back
            await storage.cancel("a")
            assert (await asyncio.wait_for(anew.get(), PATIENCE)).job_id == "a"
    assert admin.execute("SELECT count(*) FROM workers_listeners").fetchone() == (0,)


def test_a_thread_that_ends_before_its_alarm_can_be_stopped() -> None:
    """Something else woke it after `stop` had begun: it has closed its end when the alarm is sent."""

    def stop_begins() -> OwnConnection:
        listener._stopping = True
        raise psycopg.OperationalError("no")

    listener = PostgresListener("any", new_process(), stop_begins, DatabaseSubscribers())
    listener.start()
    assert listener._thread is not None
    listener._thread.join(PATIENCE)
    listener.stop(time.monotonic() + PATIENCE)
    assert listener._alarm is not None
    assert listener._alarm.fileno() == -1


async def test_what_comes_with_the_answer_to_a_statement_is_heard(
    storage: SqlStorage, admin: psycopg.Connection
) -> None:
    """A notification that the driver reads together with an answer is told as any other.

    The listener waits for a table in its first statement after it confirmed: the request is made before the answer.
    """
    async with storage.cancel_requests() as requests, AsyncExitStack() as stack:
        with admin.transaction():
            admin.execute("LOCK TABLE workers_jobs")
            await drop_listener(admin)
            with pytest.raises(StorageUnavailable, match="the connection that listens"):
                await asyncio.wait_for(requests.get(), PATIENCE)
            anew = await stack.enter_async_context(storage.cancel_requests())
            await until(lambda: is_waiting(admin, "relation"))
            admin.execute("SELECT pg_notify('workers_cancels', id || ' a') FROM workers_queues")
        assert (await asyncio.wait_for(anew.get(), PATIENCE)).job_id == "a"


async def test_queues_of_a_process_share_one_listener(
    storage: SqlStorage, postgres_url: str, admin: psycopg.Connection
) -> None:
    """However many wait, one connection listens; disconnecting the last storage closes every connection."""
    async with connected(SqlStorage(postgres_url, "other")) as other:
        waits = [asyncio.create_task(one.wait(["work"], timeout=MINUTE)) for one in (storage, other)]
        await until(lambda: is_listening(admin))
        await other.enqueue([job("a")])
        await asyncio.wait_for(waits[1], PATIENCE)
        assert not waits[0].done()
        await storage.enqueue([job("a")])
        await asyncio.wait_for(waits[0], PATIENCE)
    await storage.disconnect()
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    async def alone() -> bool:
        return admin.execute(others).fetchone() == (0,)

    await until(alone)
    await storage.connect()


async def test_who_got_jobs_follows_the_next_wake_up_without_a_look(
    storage: SqlStorage, postgres_url: str, admin: psycopg.Connection
) -> None:
    """So it is once: of several workers that are woken for one job, those that come too late look first after that."""

    async def woken(waiting: asyncio.Task[None]) -> bool:
        admin.execute("SELECT pg_notify('workers_wake', id::text) FROM workers_queues ORDER BY id")  # of no job
        return waiting.done()

    async with connected(SqlStorage(postgres_url, "other")) as other:
        for each in (storage, other):
            await each.enqueue([job("a")])
            await claim_all(each)
        first = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
        await until(lambda: woken(first))
        again, others = (asyncio.create_task(one.wait(["work"], timeout=MINUTE)) for one in (storage, other))
        await until(lambda: woken(others))
        assert not again.done()
        again.cancel()


async def test_many_long_ids_are_told_in_parts(storage: SqlStorage) -> None:
    """More events than one notification holds arrive all, in order, whatever is in the ids."""
    names = [f"{number} %20\x00\x01:\n💥" + "x" * 400 for number in range(100)]
    async with storage.events() as events:
        await storage.enqueue([job(name) for name in names])
        heard = [(await asyncio.wait_for(events.get(), PATIENCE)).job_id for _ in names]
    assert heard == names


TOLD = {
    "enqueue one": "workers_enqueue_one(id, 'c', 'any', 0, 0, 1, NULL, NULL, NULL, NULL, '', 0, NULL, false, false)",
    "enqueue": "workers_enqueue(id, '{c}', '{any}', '{0}', '{0}', '{1}', '{NULL}', '{NULL}', '{NULL}', '{NULL}',"
    " ARRAY[''::bytea], '{0}', '{NULL}', false, false)",
    "claim": "workers_claim(id, 'w', '{}', '{}', 60000, 1, 'secret', 0)",
    "settle": "workers_tell(id, '{completed:b}', false)",
}
"""What looks whether somebody subscribes."""


@pytest.mark.parametrize("call", TOLD.values(), ids=TOLD)
async def test_a_subscriber_waits_for_steps_that_did_not_see_it(
    storage: SqlStorage, admin: psycopg.Connection, call: str
) -> None:
    """A step that sends no events, as nobody subscribed, ends before a subscription is confirmed; new steps go on."""
    await storage.enqueue([job("b")])
    subscription = storage.subscribe("a")
    with admin.transaction():
        admin.execute(f"SELECT {call} FROM workers_queues".encode())
        entering = asyncio.create_task(subscription.__aenter__())
        await until(lambda: is_waiting(admin, "advisory"))
        await asyncio.wait_for(storage.enqueue([job("a")]), PATIENCE)
        assert not entering.done()
    events = await asyncio.wait_for(entering, PATIENCE)
    await claim_all(storage)
    assert (await asyncio.wait_for(events.get(), PATIENCE)).kind is JobEventKind.ACTIVE
    await subscription.__aexit__(None, None, None)


async def test_nobody_is_told_while_nobody_subscribes(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Without a subscriber events cost no notification; only the wake-up is sent."""
    admin.execute("LISTEN workers_events")
    admin.execute("LISTEN workers_wake")
    await storage.enqueue([job("a")])
    await claim_all(storage)
    told = [*admin.notifies(timeout=PATIENCE, stop_after=1), *admin.notifies(timeout=0.1)]
    assert [notice.channel for notice in told] == ["workers_wake"]


async def test_a_block_of_many_enqueues_is_one_wake_up(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """It comes at the end of the block; jobs that follow others, which take a transaction, send none either."""
    admin.execute("LISTEN workers_wake")
    async with storage.with_notify():
        await storage.enqueue([job("a"), job("b")])
        await storage.enqueue([replace(job("c"), after=("a",))])
        await storage.enqueue([job("d", deduplication=Deduplication(key="d"))])
        assert [*admin.notifies(timeout=0.1)] == []
    told = [*admin.notifies(timeout=PATIENCE, stop_after=1), *admin.notifies(timeout=0.1)]
    assert [notice.channel for notice in told] == ["workers_wake"]


async def test_only_results_that_are_soon_gone_are_sent(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """On a channel of their own, in front of the end."""
    await storage.enqueue([job("short one", keep=DROP), job("long")])
    short, long = await claim_all(storage)
    admin.execute("LISTEN workers_results")
    admin.execute("LISTEN workers_events")
    async with storage.events():
        await storage.settle([Completed(claim=short, result=b"1"), Completed(claim=long, result=b"2")])
    told = [*admin.notifies(timeout=PATIENCE, stop_after=2), *admin.notifies(timeout=0.1)]
    assert [(notice.channel, notice.payload.split(" ", 1)[1]) for notice in told] == [
        ("workers_results", "MQ== short one"),
        ("workers_events", "completed:short%20one completed:long"),
    ]
