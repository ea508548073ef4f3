"""What `SqlStorage` promises on PostgreSQL alone: nobody waits, steps run side by side, a broken connection heals."""

from __future__ import annotations

import asyncio
import traceback
from datetime import timedelta

import psycopg
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError

from tests.servers import PostgresProcess
from tests.workers.storage.sql.steps import MINUTE, claim_all, connected, ids
from workers.clock import ManualClock
from workers.errors import StorageError, StorageUnavailable, Unsupported
from workers.jobs import DROP, Completed, ErrorInfo, Failed, JobState, Released, Retried, SettleStatus
from workers.storage.base import Storage
from workers.storage.sql import SqlStorage
from workers.storage.sql import rows as sql_rows
from workers.storage.sql.errors import translate
from workers.testing.steps import PATIENCE, claim, job, until


@pytest.fixture
def database() -> str:
    return "postgres"


async def test_a_claim_never_waits(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Rows and ordering keys somebody holds are passed over, and stay where they are."""
    await storage.enqueue([job("locked"), job("key", ordering_key="k"), job("free")])
    with admin.transaction():
        admin.execute("SELECT 1 FROM workers_jobs WHERE id = 'locked' FOR UPDATE")
        admin.execute("SELECT pg_advisory_xact_lock(workers_key((SELECT id FROM workers_queues), 'k'))")
        assert await asyncio.wait_for(ids(storage), PATIENCE) == ["free"]
    assert await ids(storage) == ["locked", "key"]


async def test_one_key_never_runs_twice_under_racing_claims(storage: SqlStorage, postgres_url: str) -> None:
    """Claims and settlements of one key from many connections run its jobs one at a time, and all of them."""
    await storage.enqueue([job(str(number), ordering_key="k") for number in range(40)])
    running: set[str] = set()
    done: list[str] = []

    async def work() -> None:
        while len(done) < 40:
            for claimed in await claim(storage, 3):
                assert not running
                running.add(claimed.job_id)
                await asyncio.sleep(0)
                running.discard(claimed.job_id)
                done.append(claimed.job_id)
                await storage.settle([Completed(claim=claimed, result=b"", keep=DROP)])

    async with asyncio.timeout(3 * PATIENCE):
        await asyncio.gather(*(work() for _ in range(4)))
    assert done == [str(number) for number in range(40)]


async def test_no_connection_is_left_in_a_transaction(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """After every kind of step all connections are idle, outside of any transaction."""
    await storage.enqueue([job("a")])
    [claimed] = await claim_all(storage)
    await storage.renew([claimed])
    await storage.settle([Completed(claim=claimed, result=b"", then=job("b"))])
    await storage.recover(10)
    await storage.sweep(10)
    await storage.cancel("b")
    states = admin.execute(
        "SELECT DISTINCT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ).fetchall()
    assert states == [("idle",)]


# Tables


async def test_a_missing_database_is_not_made(postgres_url: str) -> None:
    """Not even by a migration."""
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
        await storage.enqueue([job("a", payload=payload)])
    shown = "".join(traceback.format_exception(caught.value))
    assert "CheckViolation" in shown
    assert payload.decode() not in shown
    assert payload.hex() not in shown


async def test_a_cut_connection_is_replaced(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """Connections the server has closed while they lay idle are noticed before they are used."""
    await storage.enqueue([job("a")])
    await claim_all(storage)
    admin.execute(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await storage.enqueue([job("b")])
    assert await ids(storage) == ["b"]


async def test_functions_that_a_newer_version_has_replaced_are_asked_anew(
    storage: SqlStorage, admin: psycopg.Connection
) -> None:
    """What the connections have prepared no longer fits; they are replaced, and the step can be tried again."""
    for _ in range(10):
        await claim_all(storage)  # the driver prepares what it sees again and again
    found = admin.execute(
        "SELECT pg_get_function_identity_arguments(oid), pg_get_function_result(oid) FROM pg_proc"
        " WHERE proname = 'workers_claim'"
    ).fetchone()
    assert found is not None
    arguments, table = found
    admin.execute("ALTER FUNCTION workers_claim RENAME TO workers_claim_before")
    admin.execute(
        f"CREATE FUNCTION workers_claim({arguments}) RETURNS {table[:-1]}, one_more integer) LANGUAGE sql"
        " AS 'SELECT *, 0 FROM workers_claim_before($1, $2, $3, $4, $5, $6, $7, $8)'"
    )
    await storage.enqueue([job("a")])

    async def claimed() -> bool:
        try:
            return await ids(storage) == ["a"]
        except StorageUnavailable:
            return False

    await until(claimed)


async def test_a_restarted_server_is_found_again(restartable_postgres: PostgresProcess) -> None:
    """Nothing acknowledged is lost, a wait goes on, and steps meanwhile are unavailable, not broken."""
    url = restartable_postgres.url
    await SqlStorage(url).migrate()
    async with connected(SqlStorage(url)) as storage, storage.events() as events:
        await storage.enqueue([job("a")])
        [claimed] = await claim_all(storage)
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
    kept, dropped = await claim_all(storage)
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


async def test_completed_jobs_are_told_apart_from_those_of_others(storage: SqlStorage) -> None:
    """Of completions in one step those count whose claim holds its job, and not an old claim of it."""
    await storage.enqueue([job("again"), job("other"), job("gone")])
    old, other, gone = await claim_all(storage)
    await storage.settle([Released(claim=old), Completed(claim=gone, result=b"", keep=DROP)])
    [new] = await claim_all(storage)
    claims = [gone, other, old, new]
    outcomes = await storage.settle([Completed(claim=claimed, result=b"%d" % at) for at, claimed in enumerate(claims)])
    assert [outcome.status.value for outcome in outcomes] == ["lost", "applied", "lost", "applied"]
    ended = [await storage.result(job_id) for job_id in ("again", "other")]
    assert [each.result for each in ended if each is not None] == [b"3", b"1"]
    repeated = await storage.settle([Completed(claim=claimed, result=b"") for claimed in claims])
    assert [each.status.value for each in repeated] == ["lost", "already_applied", "lost", "already_applied"]


# The object


def test_limits_and_repr(postgres_url: str) -> None:
    """Type checkers accept it as a `Storage`; the clock is the server's, and no password is shown."""
    storage: Storage = SqlStorage("postgresql://user:s3cret@host:1/name?sslkey=s3cret", "mail")
    assert repr(storage) == "SqlStorage('postgresql://host:1/name', queue='mail')"
    assert storage.capabilities.clock == "server"
    assert (storage.capabilities.processes, storage.capabilities.wakeup_latency) == ("many", timedelta(0))
    with pytest.raises(Unsupported, match="clock"):
        SqlStorage(postgres_url, clock=ManualClock())


async def test_worker_records_expire(storage: SqlStorage, admin: psycopg.Connection) -> None:
    """An hour later, which their rows are made to say, a sweep leaves no row behind."""
    await storage.enqueue([job("cancelled"), job("done", keep_completed=DROP)])
    await storage.cancel("cancelled")
    [claimed] = await claim_all(storage)
    await storage.settle([Completed(claim=claimed, result=b"")])
    admin.execute("UPDATE workers_jobs SET expires_at = expires_at - 3600001")
    admin.execute("UPDATE workers_seen SET seen_at = seen_at - 3600001")
    assert await storage.result("cancelled") is None
    assert await storage.sweep(10) == 2
    tables = ("workers_jobs", "workers_payloads", "workers_seen")
    assert [admin.execute(f"SELECT count(*) FROM {name}").fetchone() for name in tables] == [(0,)] * 3  # type: ignore[call-overload]  # psycopg wants literals
