"""What only `SqlStorage` on PostgreSQL promises: a broken connection heals, nobody waits, steps run side by side."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.servers import PostgresProcess
from workers.clock import ManualClock
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import StorageError, StorageUnavailable, Unsupported
from workers.jobs import (
    DROP,
    Claim,
    Completed,
    Continued,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobEventKind,
    JobState,
    NewJob,
    ProgressReport,
    Released,
    Retried,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.storage.sql import SqlStorage
from workers.storage.sql import rows as sql_rows
from workers.storage.sql.errors import translate
from workers.storage.sql.postgres import steps as sql_postgres_steps

MINUTE = timedelta(minutes=1)
ANY = {"*": MINUTE}
PATIENCE = 10.0
LISTENER = "workers listener"


def job(job_id: str, name: str = "work", **options: object) -> NewJob:
    return NewJob(id=job_id, name=name, payload=b"{}", **options)  # type: ignore[arg-type]  # fields as keywords


@asynccontextmanager
async def connected(storage: SqlStorage) -> AsyncIterator[SqlStorage]:
    await storage.connect()
    try:
        yield storage
    finally:
        await storage.disconnect()


@pytest.fixture
async def storage(postgres_url: str) -> AsyncIterator[SqlStorage]:
    await SqlStorage(postgres_url).migrate()
    async with connected(SqlStorage(postgres_url)) as storage:
        yield storage


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """The application's own engine."""
    engine = create_async_engine(postgres_url)
    yield engine
    await engine.dispose()


@pytest.fixture
def sync_engine(postgres_url: str) -> Iterator[Engine]:
    engine = create_engine(postgres_url)
    yield engine
    engine.dispose()


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection nobody else uses."""
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


async def claim(storage: Storage, limit: int = 100) -> list[Claim]:
    return await storage.claim("worker", leases=ANY, limit=limit)


async def ids(storage: Storage) -> list[str]:
    return [claimed.job_id for claimed in await claim(storage)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.005)


async def is_listening(admin: psycopg.Connection) -> bool:
    found = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s", [LISTENER]
    ).fetchone()
    return found == (1,)


async def drop_listener(admin: psycopg.Connection) -> None:
    await until(lambda: is_listening(admin))
    admin.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = %s",
        [LISTENER],
    )


@asynccontextmanager
async def child(verb: str, url: str, argument: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has connected and waits for `go`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.workers.storage.sql.child", verb, url, argument),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), PATIENCE) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def go(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")


# The listener


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
    [claimed] = await claim(storage)
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
    await claim(storage)
    async with storage.cancel_requests() as requests:
        await drop_listener(admin)
        with pytest.raises(StorageUnavailable, match="the connection that listens"):
            await asyncio.wait_for(requests.get(), PATIENCE)
        async with storage.cancel_requests() as anew:  # confirmed, so the listener is back
            await storage.cancel("a")
            assert (await asyncio.wait_for(anew.get(), PATIENCE)).job_id == "a"
    assert admin.execute("SELECT count(*) FROM workers_listeners").fetchone() == (0,)


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


async def test_many_long_ids_are_told_in_parts(storage: SqlStorage) -> None:
    """More events than one notification holds arrive all, in order, whatever is in the ids."""
    names = [f"{number} %20\x00\x01:\n💥" + "x" * 400 for number in range(100)]
    async with storage.events() as events:
        await storage.enqueue([job(name) for name in names])
        heard = [(await asyncio.wait_for(events.get(), PATIENCE)).job_id for _ in names]
    assert heard == names


async def test_a_subscriber_waits_for_steps_that_did_not_see_it(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """A step that sends no events, as nobody subscribed, ends before a subscription is confirmed; new steps go on."""
    subscription = storage.subscribe("a")
    with admin.transaction():
        admin.execute("SELECT workers_tell((SELECT id FROM workers_queues), '{completed:a}', false)")
        entering = asyncio.create_task(subscription.__aenter__())
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

        async def blocked() -> bool:
            return admin.execute(waiting).fetchone() == (1,)

        await until(blocked)
        await asyncio.wait_for(storage.enqueue([job("a")]), PATIENCE)
        assert not entering.done()
    events = await asyncio.wait_for(entering, PATIENCE)
    await claim(storage)
    assert (await asyncio.wait_for(events.get(), PATIENCE)).kind is JobEventKind.ACTIVE
    await subscription.__aexit__(None, None, None)


async def test_nobody_is_told_while_nobody_subscribes(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Without a subscriber events cost no notification; only the wake-up is sent."""
    admin.execute("LISTEN workers_events")
    admin.execute("LISTEN workers_wake")
    await storage.enqueue([job("a")])
    await claim(storage)
    assert [notice.channel for notice in admin.notifies(timeout=0.1)] == ["workers_wake"]


# Other transactions and processes


async def test_a_claim_never_waits(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Rows and ordering keys somebody holds are passed over, and stay where they are."""
    await storage.enqueue([job("locked"), job("key", ordering_key="k"), job("free")])
    with admin.transaction():
        admin.execute("SELECT 1 FROM workers_jobs WHERE id = 'locked' FOR UPDATE")
        admin.execute("SELECT pg_advisory_xact_lock(workers_key((SELECT id FROM workers_queues), 'k'))")
        assert await asyncio.wait_for(ids(storage), PATIENCE) == ["free"]
    assert await ids(storage) == ["locked", "key"]


async def test_two_processes_share_no_job(storage: SqlStorage, postgres_url: str) -> None:
    """Claims racing from two processes get every job exactly once."""
    await storage.enqueue([job(str(number)) for number in range(1_000)])
    mine: list[str] = []
    async with child("race", postgres_url) as process:
        go(process)
        assert process.stdout is not None
        first = await process.stdout.readline()
        while claims := await claim(storage, limit=7):
            mine += [claimed.job_id for claimed in claims]
        output, _ = await process.communicate()
    theirs = (first + output).decode().split()
    left = await ids(storage)  # what each passed over because the other was just looking at it
    assert mine
    assert sorted(mine + theirs + left) == sorted(str(number) for number in range(1_000))


async def test_one_key_never_runs_twice_under_racing_claims(storage: SqlStorage, postgres_url: str) -> None:
    """Claims and settlements of one key from many connections run its jobs one at a time, and all of them."""
    await storage.enqueue([job(str(number), ordering_key="k") for number in range(40)])
    running: set[str] = set()
    done: list[str] = []

    async def work() -> None:
        while len(done) < 40:
            for claimed in await claim(storage, limit=3):
                assert not running
                running.add(claimed.job_id)
                await asyncio.sleep(0)
                running.discard(claimed.job_id)
                done.append(claimed.job_id)
                await storage.settle([Completed(claim=claimed, result=b"", keep=DROP)])

    async with asyncio.timeout(3 * PATIENCE):
        await asyncio.gather(*(work() for _ in range(4)))
    assert done == [str(number) for number in range(40)]


async def test_another_processs_completion_is_told_to_a_subscriber(storage: SqlStorage, postgres_url: str) -> None:
    """A waiter for a job's end hears of it although another process ran the job."""
    async with child("complete", postgres_url) as process, storage.subscribe("a") as events:
        await storage.enqueue([job("a"), job("b")])
        go(process)
        kinds = [(await asyncio.wait_for(events.get(), PATIENCE)).kind for _ in range(3)]
    assert kinds == [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.COMPLETED]


async def test_no_connection_is_left_in_a_transaction(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """After every kind of step all connections are idle, outside of any transaction."""
    await storage.enqueue([job("a")])
    [claimed] = await claim(storage)
    await storage.renew([claimed])
    await storage.settle([Completed(claim=claimed, result=b"", then=job("b"))])
    await storage.recover(10)
    await storage.sweep(10)
    await storage.cancel("b")
    states = admin.execute(
        "SELECT DISTINCT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ).fetchall()
    assert states == [("idle",)]


# The caller's transaction


@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_jobs_share_the_fate_of_the_callers_transaction(
    storage: SqlStorage, engine: AsyncEngine, kind: type[AsyncSession] | type[AsyncConnection], ending: str
) -> None:
    """Jobs and other writes of the caller appear together, waking waiters, or never were; nobody waits meanwhile."""
    waiting = asyncio.create_task(storage.wait(["work"], timeout=MINUTE))
    async with kind(engine) as connection:
        [result] = await storage.enqueue([job("a")], connection=connection)
        assert result.status is EnqueueStatus.QUEUED
        await storage.enqueue([job("beside", "other")])
        assert await storage.status(["a"]) == [None]
        assert not waiting.done()
        await (connection.commit() if ending == "commit" else connection.rollback())
    if ending == "commit":
        await asyncio.wait_for(waiting, PATIENCE)
    waiting.cancel()
    assert await ids(storage) == (["beside"] if ending == "rollback" else ["a", "beside"])


@pytest.mark.parametrize("kind", ["Session", "Connection"])
async def test_synchronous_connections_are_accepted(storage: SqlStorage, sync_engine: Engine, kind: str) -> None:
    """A synchronous session or connection is used where the caller is."""
    with Session(sync_engine) if kind == "Session" else sync_engine.connect() as connection:
        await storage.enqueue([job("a\x00\x01")], connection=connection)
        connection.commit()
    assert await ids(storage) == ["a\x00\x01"]


async def test_events_of_the_callers_transaction_follow_its_commit(storage: SqlStorage, engine: AsyncEngine) -> None:
    """Who subscribed before the commit hears of the job, even if after the enqueue."""
    async with AsyncSession(engine) as session:
        await storage.enqueue([job("a")], connection=session)
        async with storage.events() as events:
            await session.commit()
            heard = await asyncio.wait_for(events.get(), PATIENCE)
    assert (heard.kind, heard.job_id) == (JobEventKind.QUEUED, "a")


async def test_a_connection_of_another_database_is_refused(
    storage: SqlStorage, postgres_server: str, tmp_path: Path
) -> None:
    """Jobs never go to a database other than the storage's."""
    for url in (postgres_server, f"sqlite+aiosqlite:///{tmp_path}/other.db"):
        other = create_async_engine(url)
        async with other.connect() as connection:
            with pytest.raises(StorageError, match="another database"):
                await storage.enqueue([job("a")], connection=connection)
        await other.dispose()
    with pytest.raises(TypeError, match="connection must be"):
        await storage.enqueue([job("a")], connection="nonsense")


async def test_an_enqueue_waits_for_the_same_id_in_an_open_transaction(postgres_url: str, engine: AsyncEngine) -> None:
    """Whether the other one commits decides; after `busy_timeout` the answer is that nothing is known."""
    await SqlStorage(postgres_url).migrate()
    async with (
        connected(SqlStorage(postgres_url, busy_timeout=timedelta(milliseconds=300))) as storage,
        AsyncSession(engine) as session,
    ):
        await storage.enqueue([job("a")], connection=session)
        blocked = [asyncio.create_task(storage.enqueue([job("a")])) for _ in range(3)]
        assert await asyncio.wait_for(claim(storage), PATIENCE) == []
        outcomes = await asyncio.gather(*blocked, return_exceptions=True)
        assert all(isinstance(outcome, StorageUnavailable) for outcome in outcomes)
        await session.commit()
        [result] = await storage.enqueue([job("a")])
    assert result.status is EnqueueStatus.DUPLICATE


# Tables


async def test_anybody_may_migrate_at_once(postgres_url: str) -> None:
    """Processes and threads that start together all find the tables made, once, and jobs in them stay."""
    async with child("migrate", postgres_url) as one, child("migrate", postgres_url) as other:
        go(one)
        go(other)
        await asyncio.gather(*(SqlStorage(postgres_url).migrate() for _ in range(3)))
        assert (await one.wait(), await other.wait()) == (0, 0)
    async with connected(SqlStorage(postgres_url)) as storage:
        await storage.enqueue([job("a")])
        await storage.migrate()
        assert await ids(storage) == ["a"]


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_older_tables_are_brought_forward(postgres_url: str, admin: psycopg.Connection, version: int) -> None:
    """Jobs from before there was progress, chains or keys stay; after the migration they can do all of that."""
    await SqlStorage(postgres_url).migrate()
    async with connected(SqlStorage(postgres_url)) as storage:
        await storage.enqueue([job("a")])
    admin.execute("DROP TABLE workers_marks")
    admin.execute("DROP FUNCTION workers_marked, workers_take_keys")
    for column in ("deduplication_key", "deduplication_mode"):
        admin.execute(f"ALTER TABLE workers_jobs DROP COLUMN {column}")
    if version < 3:
        admin.execute("ALTER TABLE workers_jobs DROP COLUMN chain_index")
        [claim_of_old] = admin.execute("SELECT pg_get_functiondef('workers_claim'::regproc)").fetchone() or [""]
        admin.execute("DROP FUNCTION workers_claim")
        admin.execute(claim_of_old.replace(" chain_index integer,", "").replace(" j.chain_index,", ""))
    if version < 2:
        admin.execute("ALTER TABLE workers_jobs DROP COLUMN progress")
        admin.execute("DROP FUNCTION workers_progress")
    admin.execute("UPDATE workers_schema SET version = %s", [version])
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(postgres_url).connect()
    await SqlStorage(postgres_url).migrate()
    async with connected(SqlStorage(postgres_url)) as storage:
        [claimed] = await claim(storage)
        await storage.progress([ProgressReport(claim=claimed, value=b"1")])
        assert [status and status.progress for status in await storage.status(["a"])] == [b"1"]
        await storage.settle([Continued(claim=claimed, then=job("a", chain_index=1))])
        assert [claimed.chain_index for claimed in await claim(storage)] == [1]
        keys = (Deduplication(key="k"), Deduplication(key="t", mode=DeduplicationMode.THROTTLE, ttl=MINUTE))
        for again in (False, True):
            answers = await storage.enqueue([job(f"{key.key}-{again}", deduplication=key) for key in keys])
            assert [answer.id for answer in answers] == ["k-False", "t-False"]


async def test_missing_tables_say_what_to_do(postgres_url: str) -> None:
    """A database nobody migrated is not connected to; one that does not exist is not made."""
    with pytest.raises(StorageError, match="migrate"):
        await SqlStorage(postgres_url).connect()
    nowhere = sqlalchemy.make_url(postgres_url).set(database="nowhere")
    with pytest.raises((StorageError, StorageUnavailable)):
        await SqlStorage(nowhere).migrate()


async def test_tables_dropped_under_us_are_an_error_and_not_an_outage(
    storage: SqlStorage, admin: psycopg.Connection
) -> None:
    """What no waiting repairs says what to do."""
    admin.execute("DROP TABLE workers_jobs")
    with pytest.raises(StorageError, match="migrate"):
        await storage.enqueue([job("a")])


# Errors


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("40001", StorageUnavailable),
        ("40P01", StorageUnavailable),
        ("23505", StorageUnavailable),
        ("57P01", StorageUnavailable),
        ("57P03", StorageUnavailable),
        ("08006", StorageUnavailable),
        ("53300", StorageUnavailable),
        ("55P03", StorageUnavailable),
        ("42P01", StorageError),
        ("42883", StorageError),
        ("28P01", StorageError),
        ("22021", StorageError),
    ],
)
def test_errors_are_told_apart_by_their_state(state: str, error: type[Exception]) -> None:
    """What passes by itself is unavailable, what does not is an error; no detail is quoted."""
    original = psycopg.errors.lookup(state)(f"short\nDETAIL: s3cret {state}") if _known(state) else _error(state)
    wrapped = DBAPIError("INSERT", {"payload": "s3cret"}, original)
    translated = translate(wrapped, "here")
    assert type(translated) is error
    assert "s3cret" not in f"{translated} {wrapped}"


def _known(state: str) -> bool:
    try:
        return psycopg.errors.lookup(state) is not None
    except KeyError:
        return False


def _error(state: str) -> psycopg.Error:
    kind = type("Unlisted", (psycopg.OperationalError,), {"sqlstate": state})
    return kind(f"short\nDETAIL: s3cret {state}")


async def test_an_error_quotes_no_payload(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Not even where PostgreSQL itself would show the row."""
    admin.execute("ALTER TABLE workers_payloads ADD CHECK (length(data) < 3)")
    payload = b"never to be seen"
    with pytest.raises(StorageError) as caught:
        await storage.enqueue([NewJob(id="a", name="work", payload=payload)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "CheckViolation" in shown
    assert payload.decode() not in shown
    assert payload.hex() not in shown


async def test_a_cut_connection_is_replaced(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Connections the server has closed while they lay idle are noticed before they are used."""
    await storage.enqueue([job("a")])
    await claim(storage)
    admin.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await storage.enqueue([job("b")])
    assert await ids(storage) == ["b"]


async def test_a_restarted_server_is_found_again(restartable_postgres: PostgresProcess) -> None:
    """Nothing acknowledged is lost, a wait goes on, and steps meanwhile are unavailable, not broken."""
    url = restartable_postgres.url
    await SqlStorage(url).migrate()
    async with connected(SqlStorage(url)) as storage, storage.events() as events:
        await storage.enqueue([job("a")])
        [claimed] = await claim(storage)
        waiting = asyncio.create_task(_wait_through(storage))
        await asyncio.to_thread(restartable_postgres.stop)
        with pytest.raises(StorageUnavailable):
            await storage.counts()
        await asyncio.to_thread(restartable_postgres.start)
        await until(lambda: _answers(storage))
        assert [outcome.status for outcome in await storage.settle([Released(claim=claimed)])] == [SettleStatus.APPLIED]
        await asyncio.wait_for(waiting, PATIENCE)
        assert await ids(storage) == ["a"]
        async with storage.subscribe("b"):
            await storage.enqueue([job("b")])
            while (await asyncio.wait_for(events.get(), PATIENCE)).job_id != "b":
                pass


async def _wait_through(storage: SqlStorage) -> None:
    """What a worker does: a wait that failed is begun again."""

    async def waited() -> bool:
        try:
            await storage.wait(["work"], timeout=MINUTE)
        except StorageUnavailable:
            return False
        return True

    await until(waited)


async def _answers(storage: SqlStorage) -> bool:
    try:
        await storage.counts()
    except StorageUnavailable:
        return False
    return True


# Values


@given(st.text(alphabet=st.sampled_from("\x00\x01\x02a")), st.text(alphabet=st.sampled_from("\x00\x01\x02a")))
def test_every_text_can_be_stored(one: str, other: str) -> None:
    """Without NUL, back again unchanged, and never as another."""
    encoded = sql_rows.encode_text(one)
    assert "\x00" not in encoded
    assert sql_rows.decode_text(encoded) == one
    assert (encoded == sql_rows.encode_text(other)) is (one == other)


async def test_one_token_settles_once_in_a_batch(storage: SqlStorage) -> None:
    """Of two settlements by one claim the first counts; the second learns that, or that the record went with it."""
    await storage.enqueue([job("kept"), job("dropped")])
    kept, dropped = await claim(storage)
    failure = ErrorInfo(type="E", message="")
    outcomes = await storage.settle(
        [
            Completed(claim=kept, result=b"1"),
            Failed(claim=kept, error=failure),
            Completed(claim=dropped, result=b"", keep=DROP),
            Retried(claim=dropped, delay=MINUTE, error=failure),
        ]
    )
    assert [outcome.status.value for outcome in outcomes] == ["applied", "already_applied", "applied", "lost"]
    [status] = await storage.status(["kept"])
    assert status is not None
    assert status.state is JobState.COMPLETED


async def test_an_oversized_result_fails_alone(storage: SqlStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result the database cannot hold is an error of that element; its neighbour is settled."""
    monkeypatch.setattr(sql_postgres_steps, "MAX_RESULT_BYTES", 10)
    await storage.enqueue([job("a"), job("b")])
    one, other = await claim(storage)
    outcomes = await storage.settle([Completed(claim=one, result=bytes(11)), Completed(claim=other, result=b"")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]


# Cost

_IN_ORDER = {
    "workers_jobs_ready": "TRUE",
    "workers_jobs_ready_by_name": "name = 'work'",
}


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


async def test_no_step_reads_more_of_a_long_queue(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """With 8 000 jobs behind, and statistics of a time without any, every step fetches its own rows and no others."""
    admin.execute("ANALYZE")
    for start in range(0, 8_000, 4_000):
        await storage.enqueue([job(str(start + number)) for number in range(4_000)])
    before = await _rows_read(storage, admin)
    for _ in range(10):
        claims = await claim(storage, limit=10)
        assert len(claims) == 10
        assert not (await storage.renew(claims)).lost
        await storage.settle([Completed(claim=claimed, result=b"", keep=DROP) for claimed in claims])
    assert await _rows_read(storage, admin) - before < 3_000


async def _rows_read(storage: SqlStorage, admin: psycopg.Connection) -> int:
    await storage.disconnect()  # which makes its connections report
    await storage.connect()
    found = admin.execute(
        "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables"
        " WHERE relname IN ('workers_jobs', 'workers_payloads'))"
        " + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
    ).fetchone()
    assert found is not None
    return int(found[0])


async def test_a_job_that_moves_is_counted_once(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Counting sees a job in one state, though another process releases it meanwhile."""
    await storage.enqueue([job("a")])
    await claim(storage)

    def release(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "count(*)" in statement:
            admin.execute("UPDATE workers_jobs SET state = 'ready', token = NULL, worker = NULL, lease_until = NULL")

    event.listen(Engine, "after_cursor_execute", release)
    try:
        assert sum((await storage.counts()).values()) == 1
    finally:
        event.remove(Engine, "after_cursor_execute", release)
    assert (await storage.counts())[JobState.QUEUED] == 1


async def test_a_busy_key_holds_up_nobody_else(storage: SqlStorage) -> None:
    """A thousand jobs of one running key are stepped over, and come in order when it is free."""
    await storage.enqueue([job(f"k{number:04}", ordering_key="k") for number in range(1_000)])
    await storage.enqueue([job("other")])
    first = await claim(storage, limit=50)
    while "other" not in (found := [claimed.job_id for claimed in first]):
        first += await claim(storage, limit=50)
    assert sorted(found) == ["k0000", "other"]
    await storage.settle([Completed(claim=claimed, result=b"") for claimed in first])
    assert await ids(storage) == ["k0001"]


# The object


def test_limits_and_repr(postgres_url: str) -> None:
    """Type checkers accept it as a `Storage`; the clock is the server's, and no password is shown."""
    storage: Storage = SqlStorage("postgresql://user:s3cret@host:1/name?sslkey=s3cret", "mail")
    assert repr(storage) == "SqlStorage('postgresql://host:1/name', queue='mail')"
    assert storage.limits.clock == "server"
    assert (storage.limits.processes, storage.limits.wakeup_latency) == ("many", timedelta(0))
    with pytest.raises(Unsupported, match="clock"):
        SqlStorage(postgres_url, clock=ManualClock())


async def test_tombstones_and_worker_records_expire(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """An hour later, which their rows are made to say, a sweep leaves no row behind."""
    await storage.enqueue([job("cancelled"), job("done", keep_completed=DROP)])
    await storage.cancel("cancelled")
    [claimed] = await claim(storage)
    await storage.settle([Completed(claim=claimed, result=b"")])
    admin.execute("UPDATE workers_jobs SET expires_at = expires_at - 3600001")
    admin.execute("UPDATE workers_seen SET seen_at = seen_at - 3600001")
    assert await storage.result("cancelled") is None
    assert await storage.sweep(10) == 2
    tables = ("workers_jobs", "workers_payloads", "workers_seen")
    assert [admin.execute(f"SELECT count(*) FROM {name}").fetchone() for name in tables] == [(0,)] * 3  # type: ignore[call-overload]  # psycopg wants literals


async def test_an_idle_wait_asks_next_to_nothing(storage: SqlStorage) -> None:
    """While nothing happens, a sleeping wait asks no table."""
    statements: list[str] = []

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    await storage.wait(["work"], timeout=timedelta(milliseconds=1))
    event.listen(Engine, "before_cursor_execute", count)
    try:
        await storage.wait(["work"], timeout=timedelta(milliseconds=800))
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert len(statements) <= 4, "a look before the sleep, and one at its end"
